/* The page: draws a document of runs, embedded in it or asked of a server again and again. */

const $ = id => document.getElementById(id);

function made(name, options = {}, ...children) {
  const {className, text, ...rest} = options, element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  for (const [key, value] of Object.entries(rest)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** What floats beside the pointer; one for the whole page. */
const tip = {
  place({clientX, clientY}) {
    const box = $("tip");
    box.hidden = false;
    const {width, height} = box.getBoundingClientRect();
    const right = clientX + 14 + width < innerWidth ? clientX + 14 : clientX - 14 - width;
    box.style.left = `${Math.max(4, Math.min(right, innerWidth - width - 4))}px`;
    box.style.top = `${Math.max(4, Math.min(clientY + 14, innerHeight - height - 4))}px`;
  },
  show(where, text) {
    $("tip").textContent = text;
    this.place(where);
  },
  list(where, head, rows) {
    $("tip").replaceChildren(made("strong", {text: head}), ...rows.map(([colour, label, value]) => {
      const swatch = made("i", {className: "swatch"});
      swatch.style.setProperty("--run", colour);
      return made("div", {}, made("span", {}, swatch, label), made("span", {text: value}));
    }));
    this.place(where);
  },
  hide() { $("tip").hidden = true; },
};

// A finger has no place to leave to: touching anything else puts the words away.
addEventListener("pointerdown", event => { if (!event.target.closest("canvas, svg")) tip.hide(); });

const hidden = new Set();
const view = new View();
const timelines = new Map(), charts = new Map(), measures = new Map();
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
let shown = null;

/** Things by name: made where missing, removed where no longer wanted, in the order of the names. */
function keep(things, names, host, make) {
  for (const [name, thing] of things) {
    if (names.includes(name)) continue;
    things.delete(name);
    if (thing.remove) thing.remove(); else thing.root.remove();
  }
  names.forEach((name, place) => {
    if (!things.has(name)) things.set(name, make(name));
    const root = things.get(name).root;
    if (host.children[place] !== root) host.insertBefore(root, host.children[place] || null);
  });
}

function paragraphs(host, lines) {
  host.replaceChildren(...(lines || []).map(text => made("p", {text})));
  host.hidden = !host.children.length;
}

/** Colours and dashes by label: baselines are pale, so that others show on top of them. */
function stylesOf(runs) {
  const styles = new Map();
  let lines = 0, pale = 0;
  for (const run of runs) {
    if (run.baseline) styles.set(run.label, {colour: `var(--base${pale++ % 2 || ""})`, baseline: true, dashes: ""});
    else {
      styles.set(run.label, {colour: `var(--c${lines % 8})`, baseline: false, dashes: DASHES[Math.floor(lines / 8) % 4]});
      lines++;
    }
  }
  return styles;
}

function swatch(style) {
  const box = made("i", {className: style.baseline ? "swatch base" : "swatch"});
  box.style.setProperty("--run", style.colour);
  return box;
}

function bytesText(count) {
  const [unit, size] = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]].find(([, one]) => count >= one) || ["B", 1];
  return `${(count / size).toFixed(size > 1 ? 1 : 0)} ${unit}`;
}

// ---------------------------------------------------------------- sections

function drawCards(runs, styles, tabled) {
  const cards = runs.filter(run => run.label && (!tabled || run.progress || (run.warnings || []).length));
  const open = new Set([...$("cards").querySelectorAll("details[open]")].map(one => one.dataset.run));
  $("cards").replaceChildren(...cards.map(run => drawCard(run, styles.get(run.label), open)));
  $("cards").hidden = !cards.length;
}

function drawCard(run, style, open) {
  const status = run.status || "finished", card = made("article", {className: "card"});
  card.style.setProperty("--run", style.colour);
  card.append(made("header", {}, made("h3", {}, swatch(style), run.label), made("span", {className: `status ${status}`, text: status})));
  if (run.progress) {
    const bar = made("progress", {max: 1, "aria-label": `progress of ${run.label}`});
    if (isNumber(run.progress.share)) bar.value = run.progress.share;
    card.append(bar, made("div", {className: "status", text: run.progress.text || ""}));
  }
  const facts = run.facts || [];
  if (facts.length) {
    card.append(made("dl", {className: "facts"}, ...facts.map(([name, text]) =>
      made("div", {}, made("dt", {text: name}), made("dd", {text})))));
  }
  for (const text of run.warnings || []) card.append(made("p", {className: "warning", text}));
  if ((run.stages || []).length) {
    const details = made("details", {"data-run": run.label}, made("summary", {text: run.stages.length === 1 ? "1 stage" : `${run.stages.length} stages`}), stageTable(run.stages));
    details.open = open.has(run.label);
    card.append(details);
  }
  return card;
}

function stageTable(stages) {
  const percent = value => isNumber(value) ? `${(100 * value).toFixed(0)}%` : "-";
  const columns = [
    ["stage", stage => stage.replica ? `${stage.stage} of replica ${stage.replica}` : String(stage.stage)],
    ["staleness", stage => inWords(stage.staleness, 3)],
    ["predicted", stage => inWords(stage.predicted, 3)],
    ["bubble", stage => percent(stage.bubble)],
    ["peak kept", stage => isNumber(stage.peak_bytes) ? bytesText(stage.peak_bytes) : "-"],
  ];
  if (stages.some(stage => isNumber(stage.reconstruction_error))) {
    columns.push(["input error", stage => inWords(stage.reconstruction_error, 2)]);
  }
  const head = made("tr", {}, ...columns.map(([name]) => made("th", {text: name})));
  const rows = stages.map(stage => made("tr", {}, ...columns.map(([, text]) => made("td", {text: text(stage)}))));
  return made("div", {className: "scroll"}, made("table", {}, made("thead", {}, head), made("tbody", {}, ...rows)));
}

function drawTable(table, styles) {
  $("table").hidden = !table;
  if (!table) return;
  const look = column => (table.left || []).includes(column) ? {className: "words"} : {};
  $("table").tHead.replaceChildren(made("tr", {}, ...table.heads.map((text, n) => made("th", {...look(n), text, scope: "col"}))));
  const rows = [];
  table.rows.forEach((row, number) => {
    const style = styles.get(row[0]);
    rows.push(made("tr", {}, ...row.map((text, n) => {
      const named = n === 0 && style ? made("span", {className: "run"}, swatch(style), text) : shortened(text);
      const cell = made("td", look(n), named);
      if (shortened(text) !== text) cell.title = text;
      return cell;
    })));
    const note = (table.notes || [])[number];
    if (note) rows.push(made("tr", {className: "note"}, made("td", {colspan: row.length}, made("span", {text: note}))));
  });
  $("table").tBodies[0].replaceChildren(...rows);
}

/** A number per stage is too much for a cell where there are many stages: the ends are shown. */
function shortened(text) {
  const parts = text.split(" / ");
  return parts.length > 8 ? `${parts.slice(0, 3).join(" / ")} \u2026 ${parts.slice(-2).join(" / ")}` : text;
}

function drawTimelines(runs, caption) {
  const timed = runs.filter(run => run.timeline && run.timeline.rows.length);
  $("timelines").hidden = !timed.length;
  keep(timelines, timed.map(run => run.label), $("timelines-body"), label => new Timeline(label, view, tip, timed.length === 1));
  for (const run of timed) timelines.get(run.label).update(run.timeline, run.label);
  if (!timed.length) return;
  $("timelines-caption").textContent = caption || "";
  const costs = new Map(timed.flatMap(run => run.timeline.kinds.map(kind => [kind.cost, kind])));
  const order = [...COSTS, ...[...costs.keys()].filter(cost => !COSTS.includes(cost))].filter(cost => costs.has(cost));
  $("timelines-legend").replaceChildren(...order.map(cost => {
    const box = made("i", {className: "swatch"});
    box.style.setProperty("--run", `var(${costColour(cost)})`);
    return made("span", {}, box, cost);
  }));
  const mouse = (timed.length === 1 ? "Wheel: zoom." : "Click, then wheel: zoom all.") +
    " Drag: move. Double click: back. Keys: arrows, +, \u2212, 0. Point at a box to see what it is and where its batch goes.";
  $("timelines-hint").textContent = "The number in a box is the batch. " +
    (matchMedia("(pointer: coarse)").matches ? "Pinch: zoom. Drag: move. Tap: details." : mouse);
  view.refresh();
}

function drawCurves(runs, styles, caption) {
  const names = [...new Set(runs.flatMap(run => Object.keys(run.curves || {})))];
  $("curves").hidden = !names.length;
  $("curves-caption").textContent = caption || "";
  keep(charts, names, $("curves-body"), name => new Chart(name, tip));
  for (const name of names) {
    const drawn = runs.filter(run => run.curves && run.curves[name] && !hidden.has(run.label));
    const form = runs.find(run => run.curves && run.curves[name]).curves[name];
    charts.get(name).update(drawn.map(run => ({label: run.label, ...styles.get(run.label), points: run.curves[name].points})), form);
  }
  const legend = runs.filter(run => Object.keys(run.curves || {}).length);
  $("curves-legend").replaceChildren(...legend.map(run => {
    const entry = made("button", {className: "entry", type: "button", "aria-pressed": !hidden.has(run.label)});
    entry.append(swatch(styles.get(run.label)), run.label + (run.baseline ? " (baseline)" : ""));
    entry.addEventListener("click", () => {
      if (!hidden.delete(run.label)) hidden.add(run.label);
      const place = [...$("curves-legend").children].indexOf(entry);
      drawCurves(runs, styles, caption);
      $("curves-legend").children[place].focus();
    });
    return entry;
  }));
}

function drawCosts(runs, caption) {
  const known = runs.filter(run => isNumber(run.speed));
  $("costs").hidden = !known.length;
  $("costs-caption").textContent = caption || "";
  const kept = run => (run.stages || []).map(stage => stage.peak_bytes || 0);
  const total = run => kept(run).reduce((sum, one) => sum + one, 0);
  const fastest = Math.max(...known.map(run => run.speed)), largest = Math.max(1, ...known.map(total));
  const cells = ["", "samples per second", "most bytes kept for batches under way, by stage"].map(text => made("span", {className: "head", text}));
  for (const run of known) {
    const speed = made("span", {className: "fill"}), parts = made("span", {className: "fill parts"});
    speed.style.width = `${58 * run.speed / (fastest || 1)}%`;
    parts.style.width = `${58 * total(run) / largest}%`;
    kept(run).forEach((bytes, stage, all) => {
      const part = made("i", {className: "part"});
      part.style.flex = `${bytes} 0 0`;
      part.style.opacity = 1 - 0.6 * stage / Math.max(1, all.length - 1);
      part.addEventListener("pointermove", event => tip.show(event, `stage ${run.stages[stage].stage}: ${bytesText(bytes)}`));
      part.addEventListener("pointerleave", () => tip.hide());
      parts.append(part);
    });
    const ratio = isNumber(run.ratio) ? `, ${run.ratio.toFixed(2)}\u00d7` : "";
    cells.push(made("span", {className: "name", text: run.label}),
      made("div", {className: "track"}, speed, made("span", {text: Math.round(run.speed).toLocaleString("en") + ratio})),
      made("div", {className: "track"}, parts, made("span", {text: bytesText(total(run))})));
  }
  $("costs-body").replaceChildren(...cells);
}

/** From the input to the output, in colours that show on light and dark paper. */
function stageColour(place, count) {
  const ends = [[59, 111, 182], [42, 157, 143], [224, 159, 62]], share = 2 * place / Math.max(1, count - 1);
  const first = Math.min(1, Math.floor(share)), rest = share - first;
  return `rgb(${ends[first].map((value, n) => Math.round(value + rest * (ends[first + 1][n] - value))).join(" ")})`;
}

function drawMeasures(runs, caption) {
  const measured = runs.filter(run => Object.keys(run.measures || {}).length);
  const names = [...new Set(measured.flatMap(run => Object.keys(run.measures)))];
  $("measures").hidden = !names.length;
  $("measures-caption").textContent = caption || "";
  keep(measures, names, $("measures-body"), name => new Chart(name, tip));
  const series = [...new Set(measured.flatMap(run => names.flatMap(name => Object.keys((run.measures[name] || {}).series || {}))))];
  series.sort((a, b) => a.localeCompare(b, "en", {numeric: true}));
  for (const name of names) {
    const lines = measured.flatMap((run, place) => Object.entries((run.measures[name] || {}).series || {}).map(([what, points]) => ({
      label: measured.length > 1 ? `${run.label}, ${what}` : what, points, baseline: false,
      colour: stageColour(series.indexOf(what), series.length), dashes: DASHES[place % 4],
    })));
    measures.get(name).update(lines, {x: "update"});
  }
  const some = series.length > 8 ? [0, 1, 2, 3].map(n => Math.round(n * (series.length - 1) / 3)) : series.map((_, n) => n);
  const stages = some.map(place => {
    const box = made("i", {className: "swatch"});
    box.style.setProperty("--run", stageColour(place, series.length));
    return made("span", {}, box, series[place]);
  });
  const dashed = measured.length < 2 ? [] : measured.map((run, place) => {
    const line = drawn("line", {x1: 0, x2: 26, y1: 4, y2: 4, stroke: "currentColor", "stroke-width": 1.6, "stroke-dasharray": DASHES[place % 4]});
    return made("span", {}, drawn("svg", {width: 32, height: 8}, line), run.label);
  });
  $("measures-legend").replaceChildren(...stages, ...dashed);
}

function show(board) {
  shown = board;
  const runs = board.runs || [], styles = stylesOf(runs), captions = board.captions || {};
  document.title = board.title;
  document.body.classList.toggle("wide", !board.table && runs.every(run => run.timeline && !run.curves));
  $("title").textContent = board.title;
  paragraphs($("introduction"), board.introduction);
  drawCards(runs, styles, Boolean(board.table));
  drawTable(board.table, styles);
  drawTimelines(runs, captions.timelines);
  drawCurves(runs, styles, captions.curves);
  drawCosts(runs, captions.costs);
  drawMeasures(runs, captions.measures);
  paragraphs($("closing"), board.closing);
  $("short").hidden = $("closing").hidden;
  $("footer").replaceChildren(...(board.footer || []).map(text => made("div", {text})));
  $("footer").hidden = !(board.footer || []).length;
}

// ------------------------------------------------------------------- print

function forPaper(on) {
  document.documentElement.toggleAttribute("data-print", on);
  for (const one of timelines.values()) one.draw(on ? 690 : null);
  for (const one of $("cards").querySelectorAll("details")) {
    if (on) one.dataset.before = one.open;
    one.open = on || one.dataset.before === "true";
  }
}
addEventListener("beforeprint", () => forPaper(true));
addEventListener("afterprint", () => forPaper(false));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const one of timelines.values()) one.plan();
});

// -------------------------------------------------------------------- live

let known = "";

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

/** What to say when nothing more comes: how to open it again, if the document tells. */
function farewell(why) {
  const {again} = (shown && shown.live) || {};
  notice(`${why} Shown is its last state.${again ? ` To open it again: ${again}` : ""}`);
}

async function follow() {
  let wait = 1000;
  if (!document.hidden) {
    try {
      const answer = await fetch("document.json", {cache: "no-cache"});
      if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
      const text = await answer.text();
      if (text !== known) show(JSON.parse(text));
      known = text;
      if (shown.live && shown.live.closes) {
        farewell("The run has ended, and this page follows it no longer.");
        return;
      }
      notice("");
      if (shown.live) wait = shown.live.every;
    } catch {
      farewell("No answer: the command that served this page has ended.");
      wait = 3000;
    }
  }
  setTimeout(follow, wait);
}

for (const [id, act] of Object.entries({
  "zoom-in": () => view.zoom(0.6), "zoom-out": () => view.zoom(1 / 0.6), earlier: () => view.pan(-0.4), later: () => view.pan(0.4),
  reset: () => view.reset(), everything: () => view.look(...view.bounds),
})) $(id).addEventListener("click", act);

const embedded = $("document").textContent.trim();
if (embedded) show(JSON.parse(embedded)); else follow();
