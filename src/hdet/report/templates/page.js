(function () {
  "use strict";
  const zooms = {}; // the steps that a family of figures shows, if somebody has zoomed
  let plots;
  const logSteps = document.getElementById("log-steps");
  const touch = matchMedia("(pointer: coarse)").matches;
  const options = {
    responsive: true,
    displaylogo: false,
    displayModeBar: touch || innerWidth < 720 ? false : "hover",
    modeBarButtons: [["toImage", "resetScale2d"]],
  };

  // "--c1/0.2": the style sheet's colour of that name, so opaque.
  function colour(role) {
    const [name, opacity] = role.split("/");
    const value = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    if (opacity === undefined) return value;
    const channels = [1, 3, 5].map((i) => parseInt(value.slice(i, i + 2), 16));
    return "rgba(" + channels.join(",") + "," + opacity + ")";
  }

  // A copy with colours in place of roles.
  function painted(value, key) {
    if (typeof value === "string") return /color$/.test(key) && value.startsWith("--") ? colour(value) : value;
    if (Array.isArray(value)) return value.map((item) => painted(item, key));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, painted(item, name)]));
  }

  function draw(box) {
    const plot = painted(plots[box.dataset.plot], "");
    if (touch) plot.layout.dragmode = false; // a finger scrolls the page
    plot.layout.uirevision = logSteps.checked; // what is zoomed or hidden stays so when colours change
    const views = plot.layout.meta.views;
    if (logSteps.checked && views) {
      const title = {text: "step, logarithmic", standoff: 6};
      Object.assign(plot.layout.xaxis, {type: "log", dtick: 1, range: views.log, title});
    }
    if (views && zooms[family(box)]) plot.layout.xaxis.range = [...zooms[family(box)]];
    const isNew = !box.layout;
    Plotly.react(box, plot.data, plot.layout, options);
    if (isNew && views) box.on("plotly_relayout", () => follow(box));
  }

  // Figures of one run, or of one comparison.
  function family(box) {
    return box.dataset.plot.replace(/\d+$/, "");
  }

  // Zoom the others as this one: their steps stay aligned.
  function follow(box) {
    const range = [...box.layout.xaxis.range];
    zooms[family(box)] = range;
    document.querySelectorAll(".plot").forEach((other) => {
      if (family(other) !== family(box) || !other.layout || !other.layout.meta.views) return;
      if (String(other.layout.xaxis.range) !== String(range)) Plotly.relayout(other, {"xaxis.range": [...range]});
    });
  }

  // Steps in the other scale: what was zoomed means nothing there.
  function rescale() {
    Object.keys(zooms).forEach((key) => delete zooms[key]);
    drawShown(document);
  }

  // Inside a folded run there is no width to draw for.
  function drawShown(within) {
    within.querySelectorAll(".plot").forEach((box) => {
      if (!box.closest("details:not([open])")) draw(box);
    });
  }

  // A table that is wider than the screen says so, and fades out at its right until it is scrolled to its end.
  function hint(box) {
    const hidden = box.scrollWidth - box.clientWidth;
    box.classList.toggle("wide", hidden > 1);
    box.classList.toggle("more", hidden - box.scrollLeft > 1);
  }

  function hintAll() {
    const resized = new ResizeObserver((entries) => entries.forEach((entry) => hint(entry.target)));
    document.querySelectorAll(".scroll").forEach((box) => {
      box.addEventListener("scroll", () => hint(box), {passive: true});
      resized.observe(box); // also when what it is folded into is opened
    });
  }

  // What page.py has packed.
  async function unpacked(id) {
    const letters = document.getElementById(id).textContent;
    const bytes = Uint8Array.from(atob(letters), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
  }

  // plotly.js, run as if it stood in the page.
  async function loadPlotly() {
    const script = document.createElement("script");
    script.textContent = await unpacked("plotly");
    document.head.append(script);
  }

  function giveUp(error) {
    console.error(error);
    document.querySelectorAll(".plot").forEach((box) => {
      box.textContent = "This browser cannot draw the figures; one of 2023 or later can.";
    });
  }

  async function begin() {
    plots = JSON.parse(await unpacked("plots"));
    await loadPlotly();
    document.querySelectorAll("details.run").forEach((run) => run.addEventListener("toggle", () => drawShown(run)));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawShown(document));
    if (logSteps) logSteps.addEventListener("change", rescale);
    drawShown(document);
  }

  hintAll();
  begin().catch(giveUp);
})();
