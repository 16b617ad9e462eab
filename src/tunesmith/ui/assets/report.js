"use strict";
(() => {
  const T = Tunesmith;
  const run = JSON.parse(document.getElementById("run").textContent);
  const view = T.view(location.hash.slice(1));
  const panels = new T.Panels(view, () => history.replaceState(null, "", `#${T.viewText(view)}`));
  document.getElementById("page").replaceChildren(
    T.h("h1", {}, run.name), ...T.title(run).flat().filter(Boolean), T.cards(run),
    T.section("Curves", panels.controls(), panels.root), ...T.samples(run.samples), ...T.tables(run), T.settings(run));
  panels.show(T.panelsOf(run));
})();
