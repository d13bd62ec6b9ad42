/* Timelines: what every device does when. Several of them share one view, so that they stay on one scale. */

const COSTS = ["forward", "backward", "input gradient", "weight gradient", "update", "auxiliary"];

/** The custom property that holds the colour of a class of cost. */
const costColour = cost => COSTS.includes(cost) ? "--" + cost.replace(" ", "-") : "--other";

/** Round numbers between two others, about `count` of them; whole ones if asked for. */
function roundNumbers(from, to, count, whole = false) {
  if (!(to > from)) return [from];
  const rough = (to - from) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  let step = power * ([1, 2, 5].find(factor => power * factor >= rough) || 10);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let n = Math.ceil(from / step - 1e-9); n * step <= to + step * 1e-9; n++) found.push(n * step);
  return found;
}

/** A number in as many digits as a reader needs. */
function inWords(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) {
    const [mantissa, power] = value.toExponential(Math.min(digits, 4) - 1).split("e");
    return `${Number(mantissa)}e${Number(power)}`;
  }
  return Number(value.toPrecision(digits)).toLocaleString("en", {maximumFractionDigits: 6});
}

/** What part of time all timelines of a page show. */
class View {
  constructor() {
    this.timelines = new Set();
    this.moved = false;
    this.from = 0;
    this.to = 1;
  }

  get bounds() {
    const all = [...this.timelines];
    const first = Math.min(...all.map(one => one.first)), last = Math.max(...all.map(one => one.last));
    return last > first ? [first, last] : [0, 1];
  }

  get home() {
    const windows = [...this.timelines].map(one => one.data.window).filter(Boolean);
    if (!windows.length) return this.bounds;
    const from = Math.min(...windows.map(one => one[0])), to = Math.max(...windows.map(one => one[1]));
    // On a phone boxes would be too narrow to tell apart.
    return [from, innerWidth < 600 ? (from + to) / 2 : to];
  }

  /** New data have come: a reader who has not moved goes on seeing the part that is meant to be seen. */
  refresh() {
    if (this.moved) this.look(this.from, this.to); else this.reset();
  }

  reset() {
    this.look(...this.home);
    this.moved = false;
  }

  look(from, to) {
    const [first, last] = this.bounds, all = last - first;
    const length = Math.min(Math.max(to - from, all * 1e-6), Math.max(all, this.home[1] - this.home[0]));
    this.from = Math.max(Math.min(first, this.home[0]), Math.min(from, Math.max(last, this.home[1]) - length));
    this.to = this.from + length;
    this.moved = true;
    // The first time at once: whoever points at it before the next frame gets an answer.
    for (const one of this.timelines) if (one.shownWidth) one.plan(); else one.draw();
  }

  zoom(factor, centre = (this.from + this.to) / 2) {
    this.look(centre - (centre - this.from) * factor, centre + (this.to - centre) * factor);
  }

  pan(share) {
    const shift = share * (this.to - this.from);
    this.look(this.from + shift, this.to + shift);
  }
}

class Timeline {
  /** `eager`: the wheel zooms at once; else only when the timeline has been clicked, so that the page scrolls. */
  constructor(label, view, tip, eager) {
    this.view = view;
    this.tip = tip;
    this.eager = eager;
    this.label = label;
    this.pointers = new Map();
    this.lit = null;
    this.root = document.createElement("div");
    this.root.className = "timeline";
    this.heading = document.createElement("h3");
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.root.append(this.heading, this.canvas);
    this.listen();
    new ResizeObserver(() => this.plan()).observe(this.canvas);
  }

  update(data, heading) {
    this.data = data;
    this.heading.textContent = heading;
    this.heading.hidden = !heading;
    this.rows = data.rows.map(() => []);
    this.first = Infinity;
    this.last = -Infinity;
    for (const span of data.spans) {
      this.rows[span[0]].push(span);
      this.first = Math.min(this.first, span[4]);
      this.last = Math.max(this.last, span[5]);
    }
    for (const row of this.rows) row.sort((a, b) => a[4] - b[4]);
    // Spans of a row may overlap: how far those up to each one reach tells where to begin drawing.
    this.reach = this.rows.map(row => {
      let most = -Infinity;
      return row.map(span => most = Math.max(most, span[5]));
    });
    this.rowHeight = data.rows.length > 96 ? 9 : data.rows.length > 24 ? 14 : 26;
    this.height = this.rowHeight * data.rows.length + 20;
    this.canvas.style.height = this.height + "px";
    this.canvas.setAttribute("aria-label", `Timeline ${heading}: ${data.rows.length} rows, ${data.spans.length} actions`);
    this.view.timelines.add(this);
  }

  remove() {
    this.view.timelines.delete(this);
    this.root.remove();
  }

  // ------------------------------------------------------------------ places

  get width() { return this.shownWidth - this.margin; }
  xOf(time) { return this.margin + (time - this.view.from) / (this.view.to - this.view.from) * this.width; }
  timeOf(x) { return this.view.from + (x - this.margin) / this.width * (this.view.to - this.view.from); }

  /** The number of the first span of a row that may reach beyond a time. */
  lowest(row, time) {
    const reach = this.reach[row];
    let low = 0, high = reach.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (reach[middle] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  spanAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, row = Math.floor((event.clientY - box.top) / this.rowHeight);
    if (!this.rows[row] || x < this.margin) return null;
    const time = this.timeOf(x), near = 2 * (this.view.to - this.view.from) / this.width;
    let best = null;
    for (let n = this.lowest(row, time - near); n < this.rows[row].length; n++) {
      const span = this.rows[row][n];
      if (span[4] > time + near) break;
      if (span[4] <= time && time < span[5]) best = span;
      else if (!best && span[5] > time - near) best = span;
    }
    return best;
  }

  /** What lights up together: a micro-batch on its way, or an update, which has a number of its own. */
  subject([, kind, , batch]) {
    return this.data.kinds[kind].cost === "update" ? `update ${batch}` : `batch ${batch}`;
  }

  // ----------------------------------------------------------------- drawing

  plan() {
    if (this.planned) return;
    this.planned = requestAnimationFrame(() => this.draw());
  }

  /** `paper`: the width of a sheet; a printer wants more dots. */
  draw(paper = null) {
    cancelAnimationFrame(this.planned);
    this.planned = null;
    this.shownWidth = paper || this.canvas.clientWidth;
    if (!this.shownWidth || !this.data) return;
    const scale = paper ? 3 : window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.shownWidth * scale);
    this.canvas.height = Math.round(this.height * scale);
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colour = name => style.getPropertyValue(name).trim();
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const widest = Math.max(0, ...this.data.rows.slice(0, 200).map(name => pen.measureText(name).width));
    this.margin = Math.ceil(Math.min(widest, this.shownWidth * 0.22)) + 10;
    this.drawTimes(pen, colour);
    const colours = this.data.kinds.map(({cost}) => colour(costColour(cost)));
    const inks = this.data.kinds.map(({cost}) => colour(cost === "update" ? "--on-update" : "--on-box"));
    const every = Math.ceil(12 / this.rowHeight);
    this.rows.forEach((row, number) => {
      const y = number * this.rowHeight;
      pen.fillStyle = colour("--band");
      pen.fillRect(this.margin, y + 1, this.width, this.rowHeight - 2);
      this.drawRow(pen, number, y, colours, inks);
      if (number % every) return;
      pen.fillStyle = colour("--soft");
      pen.textAlign = "left";
      pen.fillText(this.data.rows[number], 0, y + this.rowHeight / 2, this.margin - 8);
    });
  }

  drawTimes(pen, colour) {
    const {from, to} = this.view, bottom = this.rowHeight * this.rows.length;
    pen.textAlign = "center";
    const unit = this.data.unit ? " " + this.data.unit : "";
    for (const time of roundNumbers(from, to, this.width / 110)) {
      const x = this.xOf(time);
      pen.fillStyle = colour("--line");
      pen.fillRect(x, bottom, 1, 4);
      pen.fillStyle = colour("--faint");
      const words = inWords(time, 7) + unit, half = pen.measureText(words).width / 2;
      pen.fillText(words, Math.min(Math.max(x, this.margin + half), this.shownWidth - half), bottom + 12);
    }
  }

  drawRow(pen, number, y, colours, inks) {
    const row = this.rows[number], {from, to} = this.view;
    pen.save();
    pen.beginPath();
    pen.rect(this.margin, y, this.width, this.rowHeight);
    pen.clip();
    pen.textAlign = "center";
    let reached = -1;
    for (let n = this.lowest(number, from); n < row.length && row[n][4] < to; n++) {
      const [, kind, , batch, start, end] = row[n], x = this.xOf(start), wide = this.xOf(end) - x;
      if (x + wide < reached + 0.3) continue;  // thinner than what the screen shows
      reached = x + wide;
      pen.globalAlpha = this.lit === null || this.lit === this.subject(row[n]) ? 1 : 0.3;
      pen.fillStyle = colours[kind];
      pen.fillRect(x, y + 1, Math.max(wide - (wide > 3 ? 1 : 0), 0.6), this.rowHeight - 2);
      if (wide > 14 && this.rowHeight > 12 && wide > pen.measureText(batch).width + 4) {
        pen.fillStyle = inks[kind];
        pen.fillText(batch, x + wide / 2, y + this.rowHeight / 2 + 0.5);
      }
    }
    pen.restore();
  }

  // ------------------------------------------------------------ the reader

  show(event) {
    const span = this.spanAt(event), lit = span ? this.subject(span) : null;
    if (lit !== this.lit) { this.lit = lit; this.plan(); }
    if (!span) { this.tip.hide(); return; }
    const [row, kind, stage, , start, end] = span, unit = this.data.unit ? " " + this.data.unit : "";
    const own = this.data.rows[row] === `stage ${stage}` ? "" : `, ${this.data.rows[row]}`;
    const {words, cost} = this.data.kinds[kind];
    this.tip.show(event, `${cost === "update" ? "" : words + " of "}${this.subject(span)}\nstage ${stage}${own}\n` +
      `takes ${inWords(end - start)}${unit}\nfrom ${inWords(start, 6)} to ${inWords(end, 6)}${unit}`);
  }

  leave() {
    this.tip.hide();
    if (this.lit !== null) { this.lit = null; this.plan(); }
  }

  listen() {
    const on = (name, act, options) => this.canvas.addEventListener(name, act, options);
    on("wheel", event => {
      if (!this.eager && !event.ctrlKey && document.activeElement !== this.canvas) return;
      event.preventDefault();
      const x = event.clientX - this.canvas.getBoundingClientRect().left;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.view.pan(event.deltaX / this.width);
      else this.view.zoom(Math.exp(event.deltaY * (event.ctrlKey ? 0.01 : 0.0015)), this.timeOf(Math.max(this.margin, x)));
    }, {passive: false});
    on("pointerdown", event => {
      this.pointers.set(event.pointerId, event);
      this.pressed = event;
      this.canvas.setPointerCapture(event.pointerId);
    });
    on("pointermove", event => this.move(event));
    on("pointerup", event => {
      this.pointers.delete(event.pointerId);
      const tapped = this.pressed && Math.hypot(event.clientX - this.pressed.clientX, event.clientY - this.pressed.clientY) < 6;
      if (tapped) this.show(event);
    });
    on("pointercancel", event => { this.pointers.delete(event.pointerId); this.leave(); });
    on("pointerleave", event => { if (event.pointerType === "mouse") this.leave(); });
    on("blur", () => this.leave());
    on("dblclick", () => this.view.reset());
    on("keydown", event => {
      const acts = {
        ArrowLeft: () => this.view.pan(-0.2), ArrowRight: () => this.view.pan(0.2),
        "+": () => this.view.zoom(0.7), "=": () => this.view.zoom(0.7), "-": () => this.view.zoom(1 / 0.7),
        0: () => this.view.reset(), Home: () => this.view.reset(), Escape: () => this.leave(),
      };
      if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      acts[event.key]();
    });
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) {
      if (event.pointerType === "mouse") this.show(event);
      return;
    }
    const other = [...this.pointers.values()].find(one => one.pointerId !== event.pointerId);
    this.pointers.set(event.pointerId, event);
    if (other) {
      const apart = one => Math.max(12, Math.abs(one.clientX - other.clientX));
      const middle = (event.clientX + other.clientX) / 2 - this.canvas.getBoundingClientRect().left;
      this.view.zoom(apart(before) / apart(event), this.timeOf(middle));
    } else if (event.clientX !== before.clientX) {
      this.tip.hide();
      this.view.pan((before.clientX - event.clientX) / this.width);
    }
  }
}
