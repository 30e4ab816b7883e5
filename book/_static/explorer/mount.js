// Draws the carrier explorer and says in words what it shows. Needs vega.min.js and spec.js.
"use strict";

(() => {
  const { spec, data, trainLength } = window.carrierExplorer;
  const root = document.getElementById("explorer-figure");
  const plot = root.querySelector(".explorer-plot");
  const words = root.querySelector(".explorer-words");
  const view = new vega.View(vega.parse(spec), { renderer: "svg" });
  view.initialize(plot, root.querySelector(".explorer-sliders"));

  const number = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });

  function listed(name, rows) {
    if (rows.length === 0) return `${name}: none.`;
    return `${name}: ${rows.length}, the first at offset ${Math.min(...rows.map((row) => row.delta))}.`;
  }

  function say() {
    const last = view.data(data.weight).find((row) => row.tokens === view.signal("length")); // rows come in any order
    const found = view.data(data.ghosts);
    words.textContent = [
      `At length ${last.tokens} the target at offset ${view.signal("offset")} keeps a weight of ${number(last.weight)}.`,
      `The Bessel rate predicts ${number(last.predicted)}, with 1/ρ = ${number(1 / view.signal("rate"))} tokens.`,
      listed(`Ghosts from offset ${trainLength} on`, found.filter((row) => row.strength >= 0)),
      listed("Near ghosts", found.filter((row) => row.strength < 0)),
    ].join(" ");
  }

  // The plot's own width leaves out axes and padding; their share is what the drawing measures beyond it.
  let fitted = 0;
  async function fit() {
    const room = plot.clientWidth;
    if (room === 0 || room === fitted) return;
    fitted = room;
    const around = plot.querySelector("svg").getBoundingClientRect().width - view.width();
    await view.width(Math.max(120, room - around)).runAsync();
  }

  view.runAsync().then(() => {
    root.classList.add("explorer-ready");
    say();
    for (const { name, bind } of spec.signals) {
      if (bind) view.addSignalListener(name, () => view.runAfter(say));
    }
    new ResizeObserver(fit).observe(plot);
    window.carrierExplorer.view = view;
  });
})();
