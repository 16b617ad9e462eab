"use strict";
// The live pages: #/ the list, #/run/ID one run, #/compare/ID,ID several, #/start settings files, #/plan the explorer. A stream says when there is something new, and
// the page fetches it.
(() => {
  const T = Tunesmith, { h } = T;
  const main = document.getElementById("page"), link = document.getElementById("link"), where = document.getElementById("where");
  const chosen = new Set();
  let search = "", page = null, showsArchived = false;

  async function ask(path, given) {
    let answer;
    try { answer = await fetch(path, { credentials: "same-origin", ...given }); }
    catch { throw new Error("`tunesmith ui` does not answer; try again when it does."); }
    const isJson = (answer.headers.get("Content-Type") || "").startsWith("application/json");
    const content = isJson ? await answer.json() : { problem: await answer.text() };
    if (!answer.ok) throw new Error(content.problem || answer.statusText);
    return content;
  }

  const change = (path) => ask(path, { method: "POST" });

  // What a control does: not twice at a time, and what fails is said beside it, so that it can be tried again.
  // `work` gives what to say, or null where the control has nothing more to do.
  async function act(control, said, work) {
    control.disabled = true;
    said.textContent = "";
    try {
      const done = await work();
      if (done === null) return;
      said.replaceChildren(...[done || ""].flat());
    } catch (problem) { said.textContent = problem.message; said.classList.add("failed"); control.disabled = false; return; }
    said.classList.remove("failed");
    control.disabled = false;
  }
  addEventListener("unhandledrejection", (event) => { link.textContent = String(event.reason && event.reason.message || event.reason); });

  // At most one fetch a second, and none while one is under way
  function follower(path, fetchAndShow) {
    let isBusy = false, isDue = false, isOver = false;
    const run = async () => {
      if (isOver) return;
      if (isBusy) { isDue = true; return; }
      isBusy = true; isDue = false;
      try { await fetchAndShow(() => !isOver); if (!isOver) link.textContent = ""; } catch (problem) { if (!isOver) link.textContent = problem.message; }
      setTimeout(() => { isBusy = false; if (isDue) run(); }, 600);
    };
    const source = new EventSource(path);
    source.addEventListener("changed", run);
    source.addEventListener("open", () => { link.textContent = ""; run(); });
    source.addEventListener("error", () => { link.textContent = "Not connected: `tunesmith ui` does not answer."; });
    return { run, close: () => { isOver = true; source.close(); } };
  }

  const tagsOf = (run) => [...run.tags, ...(run.is_archived ? ["archived"] : [])].map((tag) => h("span", { class: "tag" }, tag));

  // The list

  function listPage() {
    document.title = "Runs - Tunesmith";
    const rows = new Map();
    const body = h("tbody");
    const compare = h("button", { type: "button", disabled: true, onclick: () => { location.hash = `#/compare/${[...chosen].join(",")}`; } }, "Compare");
    const count = h("span", { class: "soft small", role: "status" });
    const tell = () => { compare.disabled = chosen.size < 2; compare.textContent = chosen.size < 2 ? "Compare" : `Compare ${chosen.size} runs`; };
    const heads = [["", ""], ["Run", ""], ["State", ""], ["Model", ""], ["Method", ""], ["Data", ""], ["Step", "n"], ["Best held-out", "n"], ["Last loss", "n"], ["Tokens/s", "n"], ["Memory", "n"], ["Left", "n"], ["Loss", ""]];
    const field = h("input", { type: "search", value: search, "aria-label": "Search runs", placeholder: "Search: name, model, data, state, tag", oninput: (e) => { search = e.target.value; filter(); } });
    const archived = h("label", {}, h("input", { type: "checkbox", checked: showsArchived, onchange: (e) => { showsArchived = e.target.checked; filter(); } }), "archived too");
    main.replaceChildren(h("h1", {}, "Runs"), h("div", { class: "controls" }, field, compare, archived, count),
      T.scrolling(h("table", { class: "runs" }, h("caption", { class: "skip" }, "All runs of the folder"),
        h("thead", {}, h("tr", {}, heads.map(([name, kind]) => h("th", { scope: "col", class: kind || null }, name || h("span", { class: "skip" }, "Compare"))))), body)));
    let runs = [];
    const clip = (name) => h("span", { class: "clip", title: name }, name.split("/").pop() || name);
    const row = (run) => {
      const cell = (name, value, kind) => h("td", { class: kind, "data-name": name }, value);
      const method = run.objective === "sft" ? run.method : `${run.method}, ${run.objective.toUpperCase()}`;
      return h("tr", {},
        h("td", {}, h("input", { type: "checkbox", checked: chosen.has(run.id), "data-at": `box${run.id}`, "aria-label": `Compare ${run.name}`, onchange: (e) => { e.target.checked ? chosen.add(run.id) : chosen.delete(run.id); tell(); } })),
        h("th", { scope: "row" }, h("a", { href: `#/run/${run.id}`, "data-at": `link${run.id}` }, run.name), tagsOf(run)),
        h("td", {}, T.state(run)), cell("model", clip(run.model)), cell("method", method), cell("data", run.data.slice(0, 3).map(clip)),
        cell("step", run.total_steps ? `${T.number(run.step, 9)} / ${T.number(run.total_steps, 9)}` : T.number(run.step, 9), "n"),
        cell("best held-out", run.is_exact ? T.loss(run.best) : "…", "n"), cell("last loss", T.loss(run.loss), "n"), cell("tokens/s", T.number(run.tokens_per_second), "n"),
        cell("memory", T.bytes(run.memory), "n"), cell("left", run.left === null ? "–" : T.clock(run.left), "n"), h("td", { class: "spark" }, T.sparkline(run.sparks)));
    };
    const filter = () => {
      const words = search.toLowerCase().split(/\s+/).filter(Boolean);
      let visible = 0;
      for (const run of runs) {
        const text = [run.name, run.model, run.method, run.objective, run.state, ...run.data, ...run.tags].join(" ").toLowerCase();
        const isShown = (showsArchived || !run.is_archived) && words.every((word) => text.includes(word));
        rows.get(run.id).element.hidden = !isShown;
        visible += isShown ? 1 : 0;
      }
      count.textContent = `${visible === runs.length ? "" : `${visible} of `}${runs.length} runs`;
    };
    tell();
    return follower("/api/stream", async (isOpen) => {
      const found = await ask("/api/runs");
      if (!isOpen()) return;
      runs = found.runs;
      where.textContent = found.folder;
      const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.at : null;
      const order = runs.map((run) => {
        const text = JSON.stringify(run), known = rows.get(run.id);
        if (!known || known.text !== text) rows.set(run.id, { text, element: row(run) });
        return rows.get(run.id).element;
      });
      if (order.length !== body.children.length || order.some((one, n) => one !== body.children[n])) body.replaceChildren(...order);
      if (focused && document.activeElement === document.body) { const again = body.querySelector(`[data-at="${focused}"]`); if (again) again.focus(); }
      filter();
    });
  }

  // One run

  function runPage(id, viewText) {
    const view = T.view(viewText), top = h("div"), below = h("div"), settings = h("div"), evaluations = h("div"), against = h("div", { "aria-live": "polite" });
    let last = null, steps = null;
    const panels = new T.Panels(view, () => { history.replaceState(null, "", `#/run/${id}?${T.viewText(view)}`); zoomed(); });
    const said = h("span", { class: "soft small", role: "status" });
    const stop = h("button", { type: "button", class: "stop", onclick: () => {
      if (!confirm("Stop this run? What has been trained is saved first.")) return;
      act(stop, said, async () => (await change(`/api/runs/${id}/stop`)).said);
    } }, "Stop (saves first)");
    const resume = h("button", { type: "button", hidden: true, onclick: () => act(resume, said, async () => { await change(`/api/runs/${id}/resume`); location.hash = "#/start"; }) }, "Resume");
    const archive = h("button", { type: "button", onclick: () => act(archive, said, async () => { await change(`/api/runs/${id}/archive?archived=${last && last.is_archived ? "no" : "yes"}`); page.run(); }) }, "Archive");
    let unkept = null;  // tags that could not be kept yet
    const tags = h("input", { type: "text", size: "24", maxlength: "500", "aria-label": "Tags, with commas between them", placeholder: "tags, with commas", onchange: () => {
      unkept = tags.value;
      act(tags, said, async () => { await change(`/api/runs/${id}/tags?tags=${encodeURIComponent(unkept)}`); unkept = null; return "Tags kept."; });
    }, onkeydown: (e) => { if (e.key === "Enter" && unkept !== null) tags.dispatchEvent(new Event("change")); } });
    const other = h("select", { onchange: () => act(other, against, async () => {
      if (other.value) return settingsTable(await ask(`/api/compare?runs=${id},${other.value}`));
    }) }, h("option", { value: "" }, "none"));
    const records = h("div", { "aria-live": "polite", tabindex: "-1" });
    const showRecords = async (step) => {
      try { records.replaceChildren(documentsSection(await ask(`/api/runs/${id}/documents?step=${step}`), id, showRecords)); }
      catch (problem) { records.replaceChildren(T.section("Documents of a step", h("p", { class: "soft" }, problem.message))); }
      records.focus();
      records.scrollIntoView({ block: "nearest" });
    };
    panels.chosen = (x) => {
      const place = last ? last.curves[view.axis].indexOf(x) : -1;
      if (place >= 0) showRecords(last.curves.step[place]);
    };
    const panel = T.section("Curves", panels.controls(), h("p", { class: "soft small" }, "Click on a point of the loss, or press Enter at the cursor, to see the documents of that step."), panels.root, records);
    main.replaceChildren(top, h("div", { class: "controls" }, stop, resume, archive, h("label", {}, "Tags ", tags), h("a", { href: `/api/runs/${id}/report`, download: "report.html" }, "Save as one file"), said), panel, evaluations, below,
      T.section("Settings that differ", h("div", { class: "controls" }, h("label", {}, "from those of", other)), against), settings);
    ask("/api/runs").then((found) => { for (const run of found.runs) if (run.id !== id) other.append(h("option", { value: run.id }, run.name)); where.textContent = found.folder; }).catch(() => {});

    // Zoomed into a long run, the steps in between are fetched
    function zoomed() {
      const range = panels.range;
      const before = steps;
      if (range === null || last === null) steps = null;
      else {
        const xs = last.curves[view.axis], at = last.curves.step;
        const inside = at.filter((step, n) => xs[n] !== null && xs[n] >= range[0] && xs[n] <= range[1]);
        const low = inside.length ? at.indexOf(inside[0]) : 0, high = inside.length ? at.indexOf(inside[inside.length - 1]) : at.length - 1;
        if (steps === null && !last.curves.is_thinned) return;
        steps = [low > 0 ? at[low - 1] : at[0], high < at.length - 1 ? at[high + 1] : at[high]];
        if (view.axis === "step") steps = [Math.floor(range[0]) - 1, Math.ceil(range[1]) + 1];
      }
      if (JSON.stringify(before) !== JSON.stringify(steps)) page.run();
    }
    const open = (root) => new Set([...root.querySelectorAll("details[open] > summary")].map((one) => one.textContent));
    function replace(root, ...content) {
      if (root.contains(document.activeElement)) return;  // somebody reads there
      const wasOpen = open(root);
      root.replaceChildren(...content);
      for (const one of root.querySelectorAll("summary")) if (wasOpen.has(one.textContent)) one.parentElement.open = true;
    }
    let shownBelow = "", shownSettings = "", shownSamples = "";
    return follower(`/api/stream?run=${id}`, async (isOpen) => {
      const run = await ask(`/api/runs/${id}${steps ? `?from=${steps[0]}&to=${steps[1]}` : ""}`);
      if (!isOpen()) return;
      last = run;
      document.title = `${run.name} - Tunesmith`;
      top.replaceChildren(h("h1", {}, run.name), ...[T.title(run), tagsOf(run), T.cards(run)].flat(2).filter(Boolean));
      stop.hidden = !(run.state === "running");
      resume.hidden = !(run.state === "stopped" || run.state === "failed");
      archive.textContent = run.is_archived ? "Take out of the archive" : "Archive";
      if (document.activeElement !== tags && unkept === null) tags.value = run.tags.join(", ");
      panels.bounds = run.curves.whole;
      panels.show(T.panelsOf(run));
      const { curves, settings: given, sparks, ...rest } = run;
      const text = JSON.stringify(rest);
      if (text !== shownBelow) { shownBelow = text; replace(below, ...T.tables(run, showRecords)); }
      const evaluated = JSON.stringify([run.curves.held_out, run.curves.tasks]);
      if (evaluated !== shownSamples) {
        const found = await ask(`/api/runs/${id}/samples`);
        if (!isOpen()) return;
        shownSamples = evaluated;
        replace(evaluations, ...T.samples(found));
      }
      if (JSON.stringify(given) !== shownSettings) { shownSettings = JSON.stringify(given); replace(settings, T.settings(run)); }
    });
  }

  // The documents of a step, worst first

  function documentsSection(found, id, again) {
    const marked = new Set(), known = new Set(found.excluded);
    const said = h("p", { role: "status", class: "any" });
    const mark = h("button", { type: "button", disabled: true, onclick: () => act(mark, said, async () => {
      const done = await change(`/api/runs/${id}/exclude?step=${found.step}&records=${[...marked].join(",")}`);
      said.replaceChildren(`${done.said} `, found.checkpoint === null ? "No checkpoint from before this step is kept; to train anew without them, set " : `To go on without them from the checkpoint of step ${found.checkpoint}: `, h("code", {}, done.command));
      said.classList.remove("failed");
      return null;  // until others are chosen
    }) }, "Mark as bad");
    const row = (one) => [
      h("label", {}, h("input", { type: "checkbox", disabled: one.hash === null || known.has(one.hash), checked: known.has(one.hash), onchange: (e) => { e.target.checked ? marked.add(one.id) : marked.delete(one.id); mark.disabled = !marked.size; } }), T.loss(one.loss)),
      h("span", {}, one.where || `${one.data}, not in the token cache any more`, known.has(one.hash) ? h("span", { class: "soft" }, " (marked as bad)") : null,
        one.elsewhere.length ? h("span", { class: "small soft" }, h("br"), `the same in ${one.elsewhere.join("; ")}`) : null),
      h("span", { class: "small" }, one.seen.map(([step, loss], n) => [n ? ", " : "", step === found.step ? `${step}` : h("a", { href: "#", onclick: (e) => { e.preventDefault(); again(step); } }, String(step)), ` (${T.loss(loss)})`])),
      one.text === null ? h("span", { class: "soft" }, "text not known") : h("details", {}, h("summary", {}, one.text.length > 100 ? `${one.text.slice(0, 100).trimEnd()}…` : one.text), h("pre", { class: "any" }, one.text), one.tokens > 400 ? h("p", { class: "soft small" }, `the first 400 of ${T.number(one.tokens, 9)} tokens`) : null),
    ];
    const heads = ["loss", "record", "steps that had it (loss)", "what the model saw"], here = new Set(found.documents.map((one) => one.id));
    const others = found.outliers.filter((one) => !here.has(one.id));
    return T.section(`Documents of step ${found.step}`,
      T.table(`${found.documents.length} of ${found.count} documents, worst first; their median is ${T.loss(found.median)}`, heads, found.documents.map(row), ["n"], true),
      others.length ? T.table("Documents of other steps that stand out, farthest first", heads, others.map(row), ["n"], true) : null,
      h("div", { class: "controls" }, mark), said);
  }

  // Several

  function settingsTable(found) {
    if (!found.differences.length) return h("p", { class: "soft" }, "Their settings are the same.");
    return T.table("Settings that differ", ["setting", ...found.runs.map((run) => run.name)],
      found.differences.map((row) => [row.name, ...found.runs.map((run) => T.shown(row.values[run.id]))]));
  }
  function comparePage(ids, viewText) {
    const view = T.view(viewText), tables = h("div");
    document.title = "Compare - Tunesmith";
    const panels = new T.Panels(view, () => history.replaceState(null, "", `#/compare/${ids.join(",")}?${T.viewText(view)}`));
    main.replaceChildren(h("h1", {}, "Compare"), T.section("Curves", panels.controls(false), panels.root), tables);
    const overlay = (title, runs, of, more) => ({ title, ...more, series: runs.flatMap((run, n) => {
      const one = of(run);
      return one ? [{ label: run.name, color: T.COLORS[n % T.COLORS.length], dashed: n >= T.COLORS.length, ...one }] : [];
    }) });
    const column = (name) => (run) => ({ x: { step: run.curves.step, tokens: run.curves.tokens, seconds: run.curves.seconds }, y: run.curves[name] });
    const heldOut = (run) => {
      const pairs = run.curves.held_out.all || Object.values(run.curves.held_out)[0];
      if (!pairs) return null;
      const at = (name) => pairs.map(([place]) => run.curves[name][place]);
      return { x: { step: at("step"), tokens: at("tokens"), seconds: at("seconds") }, y: pairs.map(([, y]) => y), points: true };
    };
    return follower("/api/stream", async (isOpen) => {
      const found = await ask(`/api/compare?runs=${ids.join(",")}`);
      if (!isOpen()) return;
      const runs = found.runs;
      panels.show([
        overlay("Training loss, smoothed", runs, column("smoothed"), { isLog: true, exact: T.loss }),
        overlay("Held-out loss", runs, heldOut, { isLog: true, exact: T.loss }),
        overlay("Learning rate", runs, column("learning_rate"), { isLog: true, fromZero: true }),
        overlay("Gradient norm", runs, column("grad_norm"), { isLog: true, fromZero: true }),
        overlay("Tokens per second", runs, column("tokens_per_second"), { fromZero: true }),
        overlay("Peak memory", runs, column("memory"), { unit: T.bytes, fromZero: true }),
      ]);
      const rows = [["state", (run) => run.state], ["step", (run) => T.number(run.step, 9)], ["best held-out loss", (run) => T.loss(run.best)], ["last held-out loss", (run) => T.loss(run.held_out)],
        ["last training loss", (run) => T.loss(run.loss)], ["tokens/s", (run) => T.number(run.measured ? run.measured.tokens_per_second : run.tokens_per_second)], ["peak memory", (run) => T.bytes(run.memory)]];
      tables.replaceChildren(
        T.section("Figures", T.table("Figures of each run", ["", ...runs.map((run) => h("a", { href: `#/run/${run.id}` }, run.name))], rows.map(([name, of]) => [name, ...runs.map(of)]))),
        ...runs.map((run) => T.verdicts(run, `Verdict: ${run.name}`)).filter(Boolean),
        T.section("Settings", settingsTable(found)));
    });
  }

  // Settings files, and what has been started here

  function startPage() {
    document.title = "Start - Tunesmith";
    const files = h("div"), starts = h("div", { "aria-live": "polite" }), said = h("p", { role: "status", class: "any" });
    main.replaceChildren(h("h1", {}, "Start a run"), h("p", { class: "soft" }, "Settings files below the folder in which these pages were started. A run is checked and planned first; it goes on when these pages end."), files, said, starts);
    let shownFiles = "", wasOpen = new Set();
    const row = (one) => [one.name, one.model, one.method, one.output, one.problem ? h("span", { class: "any" }, one.problem) : h("button", { type: "button", onclick: (e) => act(e.target, said, async () => { await change(`/api/configs/${one.id}/start`); page.run(); }) }, "Check, plan and start")];
    return follower("/api/stream", async (isOpen) => {
      const found = await ask("/api/configs");
      if (!isOpen()) return;
      if (JSON.stringify(found.configs) !== shownFiles) {
        shownFiles = JSON.stringify(found.configs);
        files.replaceChildren(found.configs.length ? T.table("Settings files", ["file", "model", "method", "output", ""], found.configs.map(row), [], true) : h("p", {}, "There are none here; `tunesmith init` writes one."));
      }
      wasOpen = new Set([...starts.querySelectorAll("details[open]")].map((one) => one.dataset.id));
      starts.replaceChildren(found.starts.length ? T.section("Started here", T.table("The newest first", ["run", "phase", "what it says"], found.starts.map((one) => [one.name,
        one.phase === "ended" ? (one.code === 0 ? "ended" : `ended with code ${one.code}`) : one.phase,
        h("details", { "data-id": one.id, open: wasOpen.has(one.id) || one.phase === "refused" }, h("summary", {}, one.said.trim().split("\n").pop().slice(0, 160) || "nothing yet"), h("pre", { class: "any" }, one.said))]), [], true)) : h("span"));
    });
  }

  // What a model, a method and hardware come to

  function planPage() {
    document.title = "Plan - Tunesmith";
    const shown = h("div", { "aria-live": "polite" }), given = {};
    const field = (name, label, made) => { given[name] = made; return h("label", {}, label, made); };
    const number = (value, more) => h("input", { type: "number", value, min: "0", ...more });
    const button = h("button", { type: "submit", disabled: true }, "Plan");
    const form = h("form", { class: "controls fields", onsubmit: (e) => { e.preventDefault(); plan(); } },
      field("model", "Model", h("select")), field("method", "Method", h("select")), field("hardware", "Hardware", h("select")),
      field("gpus", "GPUs", number("1", { min: "1", max: "64" })), field("sequence_length", "Sequence length", number("2048", { min: "8", step: "8" })),
      field("tokens", "Tokens of the run", number("10000000", { min: "1" })), field("price", "Price of a GPU hour", number("0", { step: "any" })), button);
    main.replaceChildren(h("h1", {}, "Plan explorer"), h("p", { class: "soft" }, "What fits, how fast, and what it costs, before anything is loaded; nothing leaves this machine."), form, shown);
    ask("/api/choices").then((found) => {
      const options = (select, all) => select.replaceChildren(...all.map(([value, name]) => h("option", { value }, name)));
      options(given.model, found.models.map((one) => [one.id, one.name]));
      options(given.hardware, found.hardware.map((one) => [one, one]));
      options(given.method, found.methods.map((one) => [one, one]));
      given.method.value = "lora";
      button.disabled = false;
    }).catch((problem) => { shown.textContent = problem.message; });
    async function plan() {
      button.disabled = true;
      shown.replaceChildren(h("p", { class: "soft" }, "Planning…"));
      const asked = new URLSearchParams(Object.entries(given).map(([name, one]) => [name, one.value]));
      try { shown.replaceChildren(...planned(await change(`/api/plan?${asked}`))); } catch (problem) { shown.replaceChildren(h("p", { class: "notice" }, problem.message)); }
      button.disabled = false;
    }
    return { run: () => {}, close: () => {} };
  }
  function planned(found) {
    const total = Object.values(found.memory).reduce((a, b) => a + b, 0), most = Math.max(total, found.memory_limit || 0);
    const bar = h("div", { class: "bar", role: "img", "aria-label": `${T.bytes(total)} of ${T.bytes(found.memory_limit)}` });
    const parts = Object.entries(found.memory).sort((a, b) => b[1] - a[1]);
    parts.forEach(([name, size], n) => {
      const part = h("span", { title: `${name}: ${T.bytes(size)}` });
      part.style.width = `${100 * size / most}%`;
      part.style.background = `var(${T.COLORS[n % T.COLORS.length]})`;
      bar.append(part);
    });
    const key = (name, n) => { const made = h("span", { class: "key" }, name); made.style.setProperty("--color", `var(${T.COLORS[n % T.COLORS.length]})`); return made; };
    const facts = [["parameters", T.count(found.parameters)], ["trained", T.count(found.trained)], ["tokens/s", T.number(found.tokens_per_second)], ["step", `${T.number(found.step_seconds)} s`],
      ["the run", found.run.hours === null ? "–" : T.clock(3600 * found.run.hours)], ["GPU hours", T.number(found.run.gpu_hours)], ["cost", found.run.money === null ? "–" : T.number(found.run.money)]];
    const copied = h("span", { role: "status", class: "soft small" });
    const copy = h("button", { type: "button", onclick: async () => { try { await navigator.clipboard.writeText(found.yaml); copied.textContent = "Copied."; } catch (problem) { copied.textContent = "Select the text below and copy it."; } } }, "Copy run.yaml");
    return [
      T.section(found.fits ? "It fits" : "It does not fit", h("p", {}, `${T.bytes(total)} of ${T.bytes(found.memory_limit)} of each rank at the peak${found.peak ? ` (${found.peak})` : ""}`), bar,
        T.table("Memory of each rank", ["for", "bytes"], parts.map(([name, size], n) => [key(name, n), T.bytes(size)]), ["", "n"]),
        found.changes_that_fit.length ? h("div", {}, h("p", {}, "What would make it fit, the smallest change first:"), h("ul", {}, found.changes_that_fit.map((one) => h("li", {}, one)))) : null,
        found.beyond.length ? h("p", { class: "notice" }, `This version cannot run this plan yet: ${found.beyond.join("; ")}.`) : null),
      T.section("Speed and cost", h("dl", { class: "cards" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))),
      T.section("Why", T.table("The plan with its reasons", ["", "choice", "why"], found.plan.map((one) => [one.topic, one.choice, one.why]), ["", "", "why"])),
      found.alternatives.length ? T.section("Alternatives", T.table("What else is possible", ["", "tokens/s", "memory", ""], found.alternatives.map((one) => [one.what, T.number(one.tokens_per_second), T.bytes(one.bytes), one.remark]), ["", "n", "n"])) : null,
      T.section("run.yaml", h("div", { class: "controls" }, copy, copied), h("pre", { class: "any", tabindex: "0" }, found.yaml)),
    ].filter(Boolean);
  }

  function route() {
    const [path, viewText] = location.hash.slice(1).split("?");
    if (path === "page") return;  // the link that skips to the page
    if (page) page.close();
    link.textContent = "";
    const run = /^\/run\/([0-9a-f]{16})$/.exec(path), several = /^\/compare\/([0-9a-f]{16}(?:,[0-9a-f]{16})*)$/.exec(path);
    page = run ? runPage(run[1], viewText) : several ? comparePage(several[1].split(","), viewText) : path === "/start" ? startPage() : path === "/plan" ? planPage() : listPage();
    scrollTo(0, 0);
  }
  document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
  addEventListener("hashchange", route);
  route();
})();
