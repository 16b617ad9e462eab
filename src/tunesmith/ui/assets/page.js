"use strict";
// What a run's page is made of, for `tunesmith report` and `tunesmith ui` alike. All that comes out of a run is put in as
// text nodes and by CSSOM, never as HTML.

const Tunesmith = (() => {
  const COLORS = ["--a", "--b", "--c", "--d", "--e", "--f", "--g", "--h", "--i"];
  const BINARY = Array.from({ length: 46 }, (_, n) => 2 ** n);
  const AXES = { step: "step", tokens: "tokens", seconds: "time" };

  function h(tag, given, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(given || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (name === "checked" || name === "value" || name === "disabled") made[name] = value;
      else made.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat(3)) if (child !== null && child !== undefined && child !== false) made.append(child);
    return made;
  }

  // Figures as people read them

  function number(value, digits = 4) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2);
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(digits)));
  }
  const count = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
  function bytes(value) {
    if (value === null || value === undefined) return "–";
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let place = 0;
    while (Math.abs(value) >= 1024 && place < 4) { value /= 1024; place += 1; }
    return `${value >= 100 || place === 0 ? Math.round(value) : value.toFixed(1)} ${units[place]}`;
  }
  function clock(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
    const all = Math.round(seconds), hours = Math.floor(all / 3600), minutes = Math.floor(all / 60) % 60;
    const two = (n) => String(n).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(all % 60)} h` : minutes ? `${minutes}:${two(all % 60)} min` : `${all} s`;
  }
  function day(seconds) {
    return seconds ? new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC" : "–";
  }
  const share = (measured, predicted) => (measured && predicted ? `${measured >= predicted ? "+" : "−"}${Math.abs((measured / predicted - 1) * 100).toFixed(0)}%` : "–");
  const shown = (value) => (value === null || value === undefined ? "not set" : typeof value === "string" ? value : JSON.stringify(value));
  const loss = (value) => (value === null || value === undefined ? "–" : Math.abs(value) < 1000 ? value.toFixed(4) : number(value));

  // What is wider than its place can be scrolled by the keyboard, too; what is not is no stop of the Tab key
  const widths = new ResizeObserver((all) => {
    for (const { target } of all) {
      const box = target.closest(".scroll");
      if (!box) continue;
      const given = { tabindex: "0", role: "region", "aria-label": (box.querySelector("caption") || box).textContent.slice(0, 120) };
      for (const [name, value] of Object.entries(given)) if (box.scrollWidth > box.clientWidth) box.setAttribute(name, value); else box.removeAttribute(name);
    }
  });
  const scrolling = (made) => { const box = h("div", { class: "scroll" }, made); widths.observe(box); widths.observe(made); return box; };

  // `isStacked`: on a phone each row is a card
  function table(caption, heads, rows, kinds = [], isStacked = false) {
    return scrolling(h("table", { class: isStacked ? "stacked" : null }, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, heads.map((head, place) => h("th", { scope: "col", class: kinds[place] }, head || h("span", { class: "skip" }, place ? "more" : "name"))))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, place) =>
        place === 0 ? h("th", { scope: "row", class: kinds[0] }, cell) : h("td", { class: kinds[place], "data-name": isStacked ? heads[place] : null }, cell)))))));
  }
  const section = (title, ...content) => {
    const id = "s-" + title.toLowerCase().replace(/[^a-z]+/g, "-");
    return h("section", { "aria-labelledby": id }, h("h2", { id }, title), ...content);
  };
  const state = (run) => h("span", { class: `state ${run.state}` }, run.state);

  function sparkline(values) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 88 28");
    svg.setAttribute("aria-hidden", "true");
    if (values.length > 1) {
      const low = Math.min(...values), span = Math.max(...values) - low || 1;
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", values.map((v, n) => `${n ? "L" : "M"}${(n / (values.length - 1) * 86 + 1).toFixed(1)} ${(26 - (v - low) / span * 24).toFixed(1)}`).join(""));
      svg.append(path);
    }
    return svg;
  }

  // Charts: several panels over one x, with one cursor and one zoom

  class Panels {
    constructor(view, changed) {
      this.view = view;      // {axis, log, raw}: what the URL keeps
      this.changed = changed;
      this.range = null;     // of x, when zoomed
      this.bounds = null;    // of x by axis, where the panels hold a part of it
      this.chosen = null;    // told of the x that was clicked on, in the first panel
      this.panels = [];
      this.root = h("div", { class: "charts" });
      this.dark = matchMedia("(prefers-color-scheme: dark)");
      this.dark.addEventListener("change", () => this.draw());
      this.sizes = new ResizeObserver(() => { for (const one of this.panels) if (one.plot) one.plot.setSize(this.size(one)); });
      this.sizes.observe(this.root);
    }
    controls(hasRaw = true) {
      const set = (name, value) => { this.view[name] = value; if (name === "axis") this.range = null; this.draw(); this.changed(); };
      return h("div", { class: "controls", role: "group", "aria-label": "How the curves are drawn" },
        h("label", {}, "over", h("select", { onchange: (e) => set("axis", e.target.value) },
          Object.entries(AXES).map(([axis, name]) => h("option", { value: axis, selected: axis === this.view.axis }, name)))),
        h("label", {}, h("input", { type: "checkbox", checked: this.view.log, onchange: (e) => set("log", e.target.checked) }), "log scale"),
        hasRaw && h("label", {}, h("input", { type: "checkbox", checked: this.view.raw, onchange: (e) => set("raw", e.target.checked) }), "each step"),
        h("button", { type: "button", onclick: () => this.zoom(0.5) }, "Zoom in"),
        h("button", { type: "button", onclick: () => this.zoom(2) }, "Zoom out"),
        h("button", { type: "button", onclick: () => this.setRange(null) }, "All"),
        h("span", { class: "soft small" }, "Drag over a chart to zoom; arrow keys move the cursor."));
    }
    // panels: [{title, unit, series: [{label, x: {step,tokens,seconds}, y, color, dashed, points, faint}], isLog}]
    show(panels) {
      const same = panels.length === this.panels.length && panels.every((one, n) => one.title === this.panels[n].title);
      if (!same) {
        for (const one of this.panels) if (one.plot) one.plot.destroy();
        this.root.replaceChildren();
        this.panels = panels.map((one) => this.frame(one));
      } else {
        panels.forEach((one, n) => Object.assign(this.panels[n], one));
      }
      this.draw();
    }
    frame(panel) {
      panel.read = h("div", { class: "read" });
      panel.place = h("div", { class: "plot", tabindex: "0", role: "img", onkeydown: (e) => this.key(panel, e) });
      panel.figures = h("div", { class: "tall", tabindex: "0", role: "region", "aria-label": `${panel.title}: figures` });
      const details = h("details", { ontoggle: () => details.open && this.fill(panel) }, h("summary", {}, "Figures"), panel.figures);
      panel.details = details;
      this.root.append(h("div", { class: "chart" }, h("h3", {}, panel.title), panel.read, panel.place, details));
      return panel;
    }
    size(panel) { return { width: Math.max(200, panel.place.clientWidth || 320), height: 230 }; }
    color(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
    visible(panel) { return panel.series.filter((one) => this.view.raw || !one.faint || panel.series.length === 1); }
    aligned(series) {
      const axis = this.view.axis;
      const xs = [...new Set(series.flatMap((one) => one.x[axis]))].filter((x) => x !== null).sort((a, b) => a - b);
      const place = new Map(xs.map((x, n) => [x, n]));
      return [xs, ...series.map((one) => {
        const column = new Array(xs.length).fill(null);
        one.x[axis].forEach((x, n) => { if (x !== null && one.y[n] !== null) column[place.get(x)] = one.y[n]; });
        return column;
      })];
    }
    draw() { for (const panel of this.panels) this.drawOne(panel); }
    drawOne(panel) {
      const series = this.visible(panel);
      const data = this.aligned(series);
      const isLog = this.view.log && panel.isLog && data.slice(1).every((column) => column.every((y) => y === null || y > 0));
      const look = JSON.stringify([isLog, this.view.axis, this.dark.matches, series.map((one) => one.label)]);
      panel.place.setAttribute("aria-label", this.describe(panel, series));
      if (panel.details.open) this.fill(panel);
      if (panel.plot && panel.look === look) {
        panel.data = data;
        panel.plot.setData(data, this.range === null);
        if (this.range) panel.plot.setScale("x", { min: this.range[0], max: this.range[1] });  // draws, too
        this.say(panel, panel.plot.cursor.idx);
        return;
      }
      if (panel.plot) panel.plot.destroy();
      panel.look = look;
      panel.data = data;
      const ink = this.color("--soft"), line = this.color("--line");
      const unit = panel.unit || number;
      const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
      panel.plot = new uPlot({
        ...this.size(panel),
        legend: { show: false },
        cursor: { sync: { key: "runs" }, drag: { x: true, y: false }, points: { size: 7 } },
        scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
                  y: { distr: isLog ? 3 : 1, range: isLog ? undefined : (u, low, high) => {
                    if (low === null) return [0, 1];
                    const room = (high - low || Math.abs(high) || 1) * 0.06;
                    return [panel.fromZero && low >= 0 ? 0 : low - room, high + room];
                  } } },
        axes: [{ ...axis, space: 70, size: 34, values: (u, ticks) => ticks.map((v) => this.xText(v)) },
               { ...axis, size: 66, incrs: panel.unit === bytes ? BINARY : undefined, values: (u, ticks) => ticks.map((v) => (v === null ? "" : unit(v))) }],
        series: [{}, ...series.map((one) => ({
          label: one.label, stroke: this.color(one.color), width: one.faint ? 1 : 2, dash: one.dashed ? [6, 4] : undefined,
          spanGaps: true, points: { show: Boolean(one.points), size: 6, fill: this.color(one.color) },
        }))],
        hooks: {
          setCursor: [(u) => this.say(panel, u.cursor.idx)],
          setSelect: [(u) => {
            if (u.select.width > 4) this.setRange([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          }],
        },
      }, data, panel.place);
      panel.plot.over.addEventListener("dblclick", () => this.setRange(null));
      panel.plot.over.addEventListener("click", () => this.choose(panel));
      if (this.range) panel.plot.setScale("x", { min: this.range[0], max: this.range[1] });
      this.say(panel, null);
    }
    xText(value) {
      if (value === null || value === undefined) return "";
      if (this.view.axis === "seconds") return clock(value);
      if (value >= 1e9) return `${Number((value / 1e9).toPrecision(3))}G`;
      if (value >= 1e6) return `${Number((value / 1e6).toPrecision(3))}M`;
      if (value >= 1e4) return `${Number((value / 1e3).toPrecision(3))}k`;
      return String(Number(value.toPrecision(4)));
    }
    // One cursor over all panels: each says its own values at that x, or the last ones
    say(panel, place) {
      if (place >= panel.data[0].length) place = null;
      const series = this.visible(panel), unit = panel.exact || panel.unit || number;
      const parts = series.map((one, n) => {
        const column = panel.data[n + 1];
        let at = place === null || place === undefined ? column.length - 1 : place;
        while (at >= 0 && column[at] === null) at -= 1;
        const key = h("span", { class: `key${one.dashed ? " dashed" : ""}` }, `${one.label} ${at >= 0 ? unit(column[at]) : "–"}`);
        key.style.setProperty("--color", `var(${one.color})`);
        return key;
      });
      const at = place === null || place === undefined ? null : panel.data[0][place];
      panel.read.replaceChildren(...(at === null ? [] : [h("span", { class: "soft" }, `${AXES[this.view.axis]} ${this.view.axis === "seconds" ? clock(at) : number(at, 7)}`)]), ...parts);
    }
    describe(panel, series) {
      const unit = panel.exact || panel.unit || number;
      const parts = series.filter((one) => !one.faint || series.length === 1).map((one) => {
        const values = one.y.filter((y) => y !== null);
        if (!values.length) return `${one.label}: no values`;
        if (one.level) return `${one.label}: ${unit(values[0])}`;
        let low = values[0], high = values[0];
        for (const y of values) { if (y < low) low = y; if (y > high) high = y; }
        return `${one.label}: from ${unit(values[0])} to ${unit(values[values.length - 1])}, lowest ${unit(low)}, highest ${unit(high)}`;
      });
      return `Chart of ${panel.title}. ${parts.join(". ")}. The figures follow below.`;
    }
    fill(panel) {
      const series = this.visible(panel).filter((one) => !one.level), data = this.aligned(series), unit = panel.exact || panel.unit || number;
      const stride = Math.max(1, Math.ceil(data[0].length / 100));
      const keep = data[0].map((x, n) => n).filter((n) => n % stride === 0 || n === data[0].length - 1 || series.some((one, s) => one.points && data[s + 1][n] !== null));
      const places = keep.length > 400 ? keep.filter((n, at) => at % Math.ceil(keep.length / 400) === 0) : keep;
      panel.figures.replaceChildren(table(`${panel.title} by ${AXES[this.view.axis]}${places.length < data[0].length ? `, ${places.length} of ${data[0].length} points` : ""}`,
        [AXES[this.view.axis], ...series.map((one) => one.label)],
        places.map((n) => [this.view.axis === "seconds" ? clock(data[0][n]) : number(data[0][n], 7), ...series.map((one, s) => (data[s + 1][n] === null ? "" : unit(data[s + 1][n])))]),
        ["n", ...series.map(() => "n")]));
    }
    extent() {
      if (this.bounds) return this.bounds[this.view.axis];
      let low = Infinity, high = -Infinity;
      for (const panel of this.panels) if (panel.data && panel.data[0].length) { low = Math.min(low, panel.data[0][0]); high = Math.max(high, panel.data[0][panel.data[0].length - 1]); }
      return [low, high];
    }
    zoom(factor) {
      const [low, high] = this.extent();
      if (!(high > low)) return;
      const [from, to] = this.range || [low, high];
      const plot = this.panels[0].plot, idx = plot && plot.cursor.idx;
      const cursor = idx === null || idx === undefined ? null : this.panels[0].data[0][idx];
      const centre = cursor !== null && cursor >= from && cursor <= to ? cursor : (from + to) / 2, half = (to - from) / 2 * factor;
      const range = [Math.max(low, centre - half), Math.min(high, centre + half)];
      this.setRange(range[0] <= low && range[1] >= high ? null : range);
    }
    setRange(range) {
      this.range = range;
      const [low, high] = range || this.extent();
      for (const panel of this.panels) if (panel.plot && panel.data[0].length) panel.plot.setScale("x", { min: low, max: high });
      this.changed();
    }
    // A point of the first panel leads to what is behind it, where there is somebody to ask
    choose(panel) {
      const at = panel.plot.cursor.idx;
      if (!this.chosen || panel !== this.panels[0] || at === null || at === undefined) return;
      this.chosen(panel.data[0][at]);
    }
    key(panel, event) {
      const plot = panel.plot, last = panel.data ? panel.data[0].length - 1 : -1;
      if (!plot || last < 0) return;
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -Math.ceil(last / 20), PageDown: Math.ceil(last / 20) };
      if (event.key in moves || event.key === "Home" || event.key === "End") {
        const now = plot.cursor.idx === null || plot.cursor.idx === undefined ? last : plot.cursor.idx;
        const next = event.key === "Home" ? 0 : event.key === "End" ? last : Math.min(last, Math.max(0, now + moves[event.key]));
        plot.setCursor({ left: plot.valToPos(panel.data[0][next], "x"), top: plot.over.clientHeight / 2 }, true, true);
      } else if (event.key === "Enter") this.choose(panel);
      else if (event.key === "+" || event.key === "=") this.zoom(0.5);
      else if (event.key === "-") this.zoom(2);
      else if (event.key === "0" || event.key === "Escape") this.setRange(null);
      else return;
      event.preventDefault();
    }
  }

  // One run

  function points(curves, pairs) {
    const at = (name) => pairs.map(([place]) => curves[name][place]);
    return { x: { step: at("step"), tokens: at("tokens"), seconds: at("seconds") }, y: pairs.map(([, y]) => y) };
  }
  function level(curves, value) {  // a straight line
    const ends = (name) => (curves.step.length ? [curves[name][0], curves[name][curves.step.length - 1]] : []);
    const x = { step: ends("step"), tokens: ends("tokens"), seconds: ends("seconds") };
    return { x, y: x.step.map(() => value), level: true, dashed: true };
  }
  function panelsOf(run) {
    const c = run.curves, x = { step: c.step, tokens: c.tokens, seconds: c.seconds };
    const color = (n) => COLORS[n % COLORS.length];
    const heldOut = Object.entries(c.held_out);
    const panels = [{
      title: "Loss", isLog: true, exact: loss, series: [
        { label: "each step", x, y: c.loss, color: "--faint", faint: true },
        { label: "training", x, y: c.smoothed, color: "--a" },
        ...heldOut.map(([name, pairs], n) => ({ label: heldOut.length === 1 ? "held-out" : `held-out ${name}`, ...points(c, pairs), color: color(n + 1), points: true })),
      ],
    }];
    const byData = Object.entries(c.data);
    if (byData.length) panels.push({ title: "Training loss by data set, smoothed", isLog: true, exact: loss, series: byData.map(([name, y], n) => ({ label: name, x, y, color: color(n) })) });
    for (const name of new Set([...Object.keys(c.figures), ...Object.keys(c.held_out_figures)])) {
      const series = [];
      if (c.figures[name]) series.push({ label: "training", x, y: c.figures[name], color: "--a" });
      if (c.held_out_figures[name]) series.push({ label: "held-out", ...points(c, c.held_out_figures[name]), color: "--b", points: true });
      panels.push({ title: `Objective: ${name.replaceAll("_", " ")}`, series });
    }
    for (const [title, measures] of Object.entries(c.tasks || {})) {
      const kinds = [["", ([name]) => !name.includes("loss")], [", loss", ([name]) => name.includes("loss")]];
      for (const [what, fits] of kinds) {
        const shown = Object.entries(measures).filter(fits);
        if (!shown.length) continue;
        panels.push({ title: `Task: ${title}${what}`, series: shown.flatMap(([name, pairs], n) => [
          { label: name.replaceAll("_", " "), ...points(c, pairs), color: color(n), points: true },
          ...(n ? [] : [["lowest (95%)", 2], ["highest (95%)", 3]].filter(() => !what).map(([label, at]) => (
            { label, ...points(c, pairs.map((one) => [one[0], one[at]])), color: "--faint", faint: true, dashed: true })))]) });
      }
    }
    panels.push({ title: "Learning rate", isLog: true, fromZero: true, series: [{ label: "learning rate", x, y: c.learning_rate, color: "--c" }] });
    panels.push({ title: "Gradient norm", isLog: true, fromZero: true, series: [
      { label: "gradient norm", x, y: c.grad_norm, color: "--d" },
      ...(run.clip ? [{ label: "clipped at", ...level(c, run.clip), color: "--f" }] : [])] });
    panels.push({ title: "Tokens per second", fromZero: true, series: [
      { label: "tokens/s", x, y: c.tokens_per_second, color: "--c" },
      ...(run.predicted.tokens_per_second ? [{ label: "predicted", ...level(c, run.predicted.tokens_per_second), color: "--e" }] : [])] });
    const most = run.predicted.memory_limit, peak = Math.max(0, ...c.memory.slice(-1).map((y) => y || 0), run.predicted.memory || 0);
    panels.push({ title: "Peak memory", unit: bytes, fromZero: true, series: [
      { label: "peak so far", x, y: c.memory, color: "--a" },
      ...(run.predicted.memory ? [{ label: "predicted", ...level(c, run.predicted.memory), color: "--e" }] : []),
      ...(most && most < 20 * peak ? [{ label: "limit", ...level(c, most), color: "--f" }] : [])] });
    const byLayer = Object.entries(c.routers || {});
    if (byLayer.length) panels.push({ title: "Routers: busiest expert, times the mean", fromZero: true, series: byLayer.map(([name, pairs], n) => ({ label: name, ...points(c, pairs), color: color(n), points: true })) });
    const byCategory = Object.entries(c.memory_by);
    if (byCategory.length) panels.push({ title: "Memory by category", unit: bytes, fromZero: true, series: byCategory.flatMap(([name, pairs], n) => {
      const said = run.predicted.memory_of[name];
      return [{ label: name, ...points(c, pairs), color: color(n) }, ...(said ? [{ label: `${name}, predicted`, ...level(c, said), color: color(n) }] : [])];
    }) });
    return panels;
  }
  const OF_A_STEP = new Set(["loss spike", "exploding gradients"]);
  function alerts(run, showStep) {
    return section("Alerts", run.alerts.length ? h("ul", { class: "alerts" }, [...run.alerts].reverse().map((one) => h("li", {},
      h("strong", {}, one.name), h("span", { class: "soft small" }, ` step ${number(one.step, 9)}, ${day(one.time)}`),
      h("p", {}, one.evidence), h("p", {}, h("span", { class: "soft" }, "What to do: "), one.advice),
      showStep && OF_A_STEP.has(one.name) ? h("button", { type: "button", onclick: () => showStep(one.step) }, `Documents of step ${number(one.step, 9)}`) : null))) : h("p", { class: "soft" }, "None."));
  }
  function routers(run) {
    if (!run.routers || !run.routers.rows.length) return null;
    return section("Routers", h("details", {}, h("summary", {}, `How evenly tokens went to experts in step ${number(run.routers.step, 9)}, by layer`),
      table("Routers by layer", ["layer", "experts", "busiest, times the mean", "evenness (entropy)", "without a token"],
        run.routers.rows.map((row) => [number(row.layers, 9), number(row.experts, 9), number(row.busiest), number(row.entropy), number(row.idle, 9)]), ["n", "n", "n", "n", "n"])));
  }
  function verdicts(run, heading = "Verdicts") {
    if (!run.verdicts.length) return null;
    return section(heading, run.verdicts.map((one) => [h("p", {}, one.summary), table(`Against ${one.against}, ${day(one.time)}`,
      ["task", "measure", "this run", "against", "difference", "95% interval", "p", "verdict", "items", "to tell"],
      one.rows.map((row) => [row.task, row.measure, number(row.value), number(row.against), number(row.difference), row.low === null || row.high === null ? "–" : `${number(row.low)} to ${number(row.high)}`, row.p === null ? "–" : row.p < 1e-4 ? "<0.0001" : row.p.toFixed(4), row.verdict, number(row.items, 9), row.items_to_tell === null ? "" : number(row.items_to_tell, 9)]),
      [null, null, "n", "n", "n", "n", "n", null, "n", "n"])]));
  }
  function cards(run) {
    const done = run.total_steps ? `${number(run.step, 9)} of ${number(run.total_steps, 9)}` : number(run.step, 9);
    const p = run.predicted, m = run.measured, speed = m ? m.tokens_per_second : run.tokens_per_second;
    const rows = [
      ["Step", done, run.left !== null ? `${clock(run.left)} left` : m ? `took ${clock(m.seconds)}` : null],
      ["Training loss", loss(run.loss), "the last step's"],
      ["Held-out loss", loss(run.held_out), run.best !== null ? `best ${loss(run.best)}` : "none measured"],
      ["Tokens per second", number(speed), p.tokens_per_second ? `predicted ${number(p.tokens_per_second)}${speed && p.arithmetic_tokens_per_second ? `; ${Math.round(100 * speed / p.arithmetic_tokens_per_second)}% of what the hardware's matmul rate allows` : ""}` : null],
      ["Peak memory", bytes(run.memory), p.memory ? `predicted ${bytes(p.memory)}${p.memory_limit ? `, limit ${bytes(p.memory_limit)}` : ""}` : null],
      ["Trained parameters", count(run.trained_parameters), run.result ? `in ${run.result}/` : null],
    ];
    return h("dl", { class: "cards" }, rows.map(([name, value, more]) => h("div", {}, h("dt", {}, name), h("dd", {}, value, more ? h("span", { class: "small soft" }, more) : null))));
  }
  function title(run) {
    const parts = [run.method, run.objective === "sft" ? "SFT" : run.objective.toUpperCase(), run.data.join(", ")].filter(Boolean);
    return [h("p", {}, state(run), run.why ? h("span", { class: "soft" }, ` ${run.why}`) : null),
      h("p", { class: "any" }, run.model || "model unknown", h("span", { class: "soft" }, ` · ${parts.join(" · ")}`)),
      run.alerts.length ? h("p", { class: "notice" }, `${run.alerts.length === 1 ? "One alert" : `${run.alerts.length} alerts`}, the last at step ${number(run.alerts[run.alerts.length - 1].step, 9)}: ${run.alerts[run.alerts.length - 1].name}.`) : null,
      h("p", { class: "soft small" }, `Began ${day(run.began)}, last event ${day(run.last)}`),
      run.problems.map((one) => h("p", { class: "notice" }, one))];
  }
  function tables(run, showStep = null) {
    const p = run.predicted, m = run.measured, made = run.alerts.length ? [alerts(run, showStep)] : [];
    const rows = [];
    if (m) {
      rows.push(["tokens per second", number(m.predicted_tokens_per_second), number(m.tokens_per_second), share(m.tokens_per_second, m.predicted_tokens_per_second)]);
      rows.push(["peak memory", bytes(m.predicted_memory), bytes(m.measured_memory), share(m.measured_memory, m.predicted_memory)]);
      for (const [name, [was, is]] of Object.entries(m.memory)) rows.push([`memory: ${name}`, bytes(was), bytes(is), share(is, was)]);
    } else {
      rows.push(["tokens per second", number(p.tokens_per_second), number(run.tokens_per_second), share(run.tokens_per_second, p.tokens_per_second)]);
      rows.push(["peak memory", bytes(p.memory), bytes(run.memory), share(run.memory, p.memory)]);
    }
    made.push(section("Predicted and measured",
      table(m ? "What the plan said, and what the run measured" : "What the plan said, and what has been measured so far", ["", "predicted", "measured", "difference"], rows, [null, "n", "n", "n"]),
      Object.keys(p.memory_by).length ? h("details", {}, h("summary", {}, "Predicted memory by category, at the peak of a step"), table("Predicted memory", ["category", "memory"], Object.entries(p.memory_by).map(([name, value]) => [name, bytes(value)]), [null, "n"])) : null,
      Object.keys(p.seconds_by).length ? h("details", {}, h("summary", {}, "Predicted time of a step, by what it is spent on"), table("Predicted time", ["", "seconds"], Object.entries(p.seconds_by).map(([name, value]) => [name, number(value, 3)]), [null, "n"])) : null));
    for (const told of [verdicts(run), routers(run)]) if (told) made.push(told);
    if (m && Object.keys(m.spent).length) made.push(section("Where the time went", table("All the time of the last sitting", ["", "time"], Object.entries(m.spent).map(([name, value]) => [name, clock(value)]), [null, "n"])));
    const f = run.profile, share100 = (value) => (value === null ? "–" : `${(100 * value).toFixed(0)}%`);
    if (f) made.push(section("Profile", h("p", { class: "any" }, `Step ${number(f.step, 9)} on ${f.device}: ${number(f.tokens_per_second)} tokens/s, ${number(f.tflops)} TFLOP/s${f.share_of_peak === null ? "" : `, ${share100(f.share_of_peak)} of the hardware's peak`}${f.busy === null ? "" : `; the GPU computes in ${share100(f.busy)} of the step`}. ${f.bound}`),
      table("Where the step's time goes, by region", ["region", "seconds"], Object.entries(f.regions).map(([name, seconds]) => [name, number(seconds, 3)]), [null, "n"]),
      h("details", {}, h("summary", {}, "Kernels that take longest"), table("Kernels, by time", ["kernel", "calls", "seconds", "of the step"], f.kernels.map((one) => [one.name, number(one.calls, 9), number(one.seconds, 3), share100(one.share)]), [null, "n", "n", "n"])),
      h("p", { class: "soft small" }, "The trace for Perfetto and the picture of memory lie in the run's folder, under profile/.")));
    made.push(section("Warnings and notes", run.warnings.length ? h("ul", { class: "warnings" }, run.warnings.map((one) => h("li", {}, h("span", { class: "soft small" }, `${day(one.time)} `), one.message))) : h("p", { class: "soft" }, "None.")));
    made.push(section("Plan", run.plan.length ? table("What was decided, and why", ["", "choice", "why"], run.plan.map((one) => [one.topic, one.choice, one.why]), [null, null, "why"]) : h("p", { class: "soft" }, "There is no plan."),
      Object.keys(run.plan_facts).length ? h("details", {}, h("summary", {}, "All of the plan"), table("plan.json", ["field", "value"], Object.entries(run.plan_facts).map(([name, value]) => [name, shown(value)]))) : null));
    made.push(section("Checkpoints", run.checkpoints.length ? table("Written, the newest first", ["step", "when", "took", ""], [...run.checkpoints].reverse().map((one) => [number(one.step, 9), day(one.time), clock(one.seconds), one.is_there ? "kept" : "removed since"]), ["n"]) : h("p", { class: "soft" }, "None yet.")));
    return made;
  }

  // Each evaluation: answers side by side, and held-out records with the loss of each token

  const words = (text) => text.match(/^\s+|\S+\s*/g) || [];  // with the space behind them
  // The words that two texts have in common, in their order (longest common subsequence); of each, which are not
  function changed(before, after) {
    const a = words(before).slice(0, 1500), b = words(after).slice(0, 1500), width = b.length + 1, isSame = (i, j) => a[i].trim() === b[j].trim();
    const longest = new Uint16Array((a.length + 1) * width);
    for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) {
      longest[i * width + j] = isSame(i, j) ? longest[(i + 1) * width + j + 1] + 1 : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
    const left = [], right = [];
    const put = (side, text, isOther) => { const last = side[side.length - 1]; if (last && last.isOther === isOther) last.text += text; else side.push({ text, isOther }); };
    let i = 0, j = 0;
    while (i < a.length || j < b.length) {
      if (i < a.length && j < b.length && isSame(i, j)) { put(left, a[i++], false); put(right, b[j++], false); }
      else if (j >= b.length || (i < a.length && longest[(i + 1) * width + j] >= longest[i * width + j + 1])) put(left, a[i++], true);
      else put(right, b[j++], true);
    }
    return [left, right];
  }
  const marked = (parts, tag) => h("div", { class: "any said" }, parts.map((one) => (one.isOther && one.text.trim() ? h(tag, {}, one.text) : one.text)));
  const stepChoice = (label, steps, chosen, tell) => h("label", {}, label, h("select", { onchange: (e) => tell(Number(e.target.value)) }, steps.map((step) => h("option", { value: step, selected: step === chosen }, String(step)))));

  function answers(found) {
    const steps = [...new Set(found.answers.map((one) => one.step))];
    if (!steps.length) return null;
    const body = h("div");
    let [from, to] = [steps[0], steps[steps.length - 1]];
    const of = (step) => new Map(found.answers.filter((one) => one.step === step).map((one) => [JSON.stringify([one.task, one.prompt]), one]));
    const scores = (one) => Object.entries(one.scores).map(([name, value]) => `${name.replaceAll("_", " ")} ${number(value)}`).join(", ");
    const draw = () => {
      const before = of(from), after = of(to);
      body.replaceChildren(...[...after].map(([key, now]) => {
        const was = before.get(key), [left, right] = was ? changed(was.answer, now.answer) : [[], [{ text: now.answer, isOther: false }]];
        const side = (step, parts, tag, one) => h("div", {}, h("p", { class: "soft small" }, `step ${number(step, 9)}${one && scores(one) ? `: ${scores(one)}` : ""}`), one ? marked(parts, tag) : h("p", { class: "soft" }, "not asked then"));
        return h("article", { class: "answer" }, h("p", { class: "any" }, h("span", { class: "soft small" }, `${now.task}: `), now.prompt),
          h("div", { class: "pair" }, side(from, left, "del", was), side(to, right, "ins", now)),
          was && was.answer === now.answer ? h("p", { class: "soft small" }, "The same answer.") : null);
      }));
    };
    draw();
    return section("Answers", h("p", { class: "soft small" }, "To the same prompts at two evaluations; what only the earlier one says is struck through, what only the later one says is underlined."),
      h("div", { class: "controls" }, stepChoice("step", steps, from, (step) => { from = step; draw(); }), stepChoice("beside step", steps, to, (step) => { to = step; draw(); })), body);
  }

  const LEVELS = [0.5, 1, 2, 4, 8];
  const levelOf = (value) => LEVELS.filter((one) => value >= one).length;
  function tokenLosses(found) {
    const steps = found.steps.filter((step) => found.tokens.some((one) => one.losses[step]));
    if (!steps.length) return null;
    const body = h("div");
    let chosen = steps[steps.length - 1];
    const draw = () => body.replaceChildren(...found.tokens.filter((one) => one.losses[chosen]).map((one) => {
      const losses = one.losses[chosen], counted = losses.filter((value) => value !== null);
      const mean = counted.reduce((a, b) => a + b, 0) / (counted.length || 1);
      const worst = losses.map((value, n) => [value, n]).filter(([value]) => value !== null).sort((a, b) => b[0] - a[0]).slice(0, 8);
      return h("article", { class: "answer" }, h("p", { class: "soft small any" }, `${one.data}: ${one.where}; ${counted.length} target tokens of ${losses.length}, mean loss ${loss(mean)}`),
        h("p", { class: "tokens any" }, one.pieces.map((piece, n) => h("span", losses[n] === null ? { class: "masked" } : { class: `l${levelOf(losses[n])}`, title: loss(losses[n]) }, piece))),
        h("details", {}, h("summary", {}, "Highest losses"), table("Tokens with the highest losses", ["token", "loss", "after"], worst.map(([value, n]) => [JSON.stringify(one.pieces[n]), loss(value), one.pieces.slice(Math.max(0, n - 6), n).join("")]), [null, "n"])));
    }));
    draw();
    const legend = h("p", { class: "tokens legend small", "aria-hidden": "true" }, h("span", { class: "masked" }, "not a target"), " ", ["below 0.5", ...LEVELS.map((one) => `from ${one}`)].map((name, n) => [h("span", { class: `l${n}` }, name), " "]));
    return section("Held-out records, token by token", h("p", { class: "soft small" }, "As the model sees them: tokens that count in the loss, coloured by it, and those that do not in grey."),
      h("div", { class: "controls" }, stepChoice("at step", steps, chosen, (step) => { chosen = step; draw(); })), legend, body);
  }
  const samples = (found) => (found ? [answers(found), tokenLosses(found)].filter(Boolean) : []);

  function settings(run) {
    const rows = Object.entries(run.settings).map(([name, value]) => [name, shown(value)]);
    const versions = Object.entries(run.versions).map(([name, value]) => `${name} ${value}`).join(", ");
    return section("Settings", table(versions ? `As the run was started, with ${versions}` : "As the run was started", ["setting", "value"], rows));
  }

  const view = (text) => { const given = new URLSearchParams(text); return { axis: given.get("axis") in AXES ? given.get("axis") : "step", log: given.get("log") === "1", raw: given.get("raw") !== "0" }; };
  const viewText = (one) => `axis=${one.axis}&log=${one.log ? 1 : 0}&raw=${one.raw ? 1 : 0}`;

  return { h, table, section, state, sparkline, number, count, bytes, clock, day, loss, shown, COLORS, Panels, panelsOf, cards, title, tables, verdicts, samples, scrolling, settings, view, viewText };
})();
