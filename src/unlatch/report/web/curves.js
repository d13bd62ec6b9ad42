/* Curves: one chart per quantity, one line per run, a band where several runs were made of it. */

// Asked of the parser, so that the page holds no address at all.
const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI;

function drawn(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const isNumber = value => typeof value === "number" && Number.isFinite(value);

class Chart {
  constructor(name, tip) {
    this.tip = tip;
    this.cursor = null;
    this.root = document.createElement("figure");
    this.root.className = "chart";
    this.heading = document.createElement("h3");
    this.heading.textContent = name;
    this.svg = drawn("svg", {tabindex: 0, role: "img", "aria-label": name});
    this.root.append(this.heading, this.svg);
    this.listen();
    new ResizeObserver(() => { if (this.svg.clientWidth && this.svg.clientWidth !== this.width) this.draw(); }).observe(this.svg);
  }

  /** `lines`: label, colour, points [x, y, least, most], whether it is a baseline, dashes; `form`: x, log, share. */
  update(lines, form) {
    this.lines = lines;
    this.form = form;
    this.places = [...new Set(lines.flatMap(line => line.points.map(point => point[0])))].sort((a, b) => a - b);
    this.draw();
  }

  // ------------------------------------------------------------------ scales

  prepare() {
    this.width = this.svg.clientWidth || this.width || 500;
    this.height = 236;
    this.edge = {left: 46, right: 10, top: 8, bottom: 34};
    const values = this.lines.flatMap(line => line.points.flatMap(point => point.slice(1))).filter(isNumber);
    this.log = Boolean(this.form.log) && values.length > 0 && values.every(value => value > 0);
    let low = Math.min(...values), high = Math.max(...values);
    if (!values.length) [low, high] = [0, 1];
    if (this.log) {
      [low, high] = [Math.log10(low), Math.log10(high)];
    }
    const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 0.5;
    this.low = low - room;
    this.high = this.form.share ? Math.max(high, Math.min(1, high + room)) : high + room;
    if (!this.log && low >= 0 && this.low < 0) this.low = 0;
    this.start = this.places.length ? this.places[0] : 0;
    this.end = this.places.length ? this.places[this.places.length - 1] : 1;
    if (this.end === this.start) [this.start, this.end] = [this.start - 1, this.end + 1];
  }

  x(place) {
    return this.edge.left + (place - this.start) / (this.end - this.start) * (this.width - this.edge.left - this.edge.right);
  }

  y(value) {
    const scaled = this.log ? Math.log10(value) : value;
    return this.edge.top + (this.high - scaled) / (this.high - this.low) * (this.height - this.edge.top - this.edge.bottom);
  }

  marks() {
    if (!this.log) return roundNumbers(this.low, this.high, 5);
    const decades = this.high - this.low, factors = decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 3, 5, 7];
    const found = [];
    const every = Math.ceil(decades / 6);
    for (let power = Math.floor(this.low); power <= this.high; power++) {
      if (decades > 6 && power % every) continue;
      for (const factor of factors) {
        const place = power + Math.log10(factor);
        if (place >= this.low && place <= this.high) found.push(factor * 10 ** power);
      }
    }
    return found.length > 1 ? found : roundNumbers(10 ** this.low, 10 ** this.high, 4);
  }

  shown(value) {
    if (!isNumber(value)) return "not finite";
    return this.form.share ? `${(100 * value).toFixed(1)}%` : inWords(value, 3);
  }

  marked(value) {
    return this.form.share ? `${Number((100 * value).toFixed(2))}%` : inWords(value, 3);
  }

  // ----------------------------------------------------------------- drawing

  draw() {
    if (!this.lines) return;
    this.prepare();
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    const {left, right, top: above, bottom} = this.edge, floor = this.height - bottom, parts = [];
    for (const value of this.marks()) {
      const y = this.y(value);
      parts.push(drawn("line", {class: "gridline", x1: left, x2: this.width - right, y1: y, y2: y}));
      parts.push(drawn("text", {x: left - 7, y: y + 4, "text-anchor": "end"}, this.marked(value)));
    }
    const single = this.places.length === 1;
    const steps = single ? this.places : roundNumbers(this.start, this.end, this.width / 90, true);
    for (const place of steps) {
      parts.push(drawn("text", {x: this.x(place), y: floor + 16, "text-anchor": "middle"}, inWords(place, 7)));
    }
    const words = {step: "batches", epoch: "epochs", update: "updates"}[this.form.x] || this.form.x || "";
    parts.push(drawn("text", {x: (left + this.width - right) / 2, y: this.height - 3, "text-anchor": "middle"}, words));
    // Broad and pale ones first: a line that coincides with them, as exact methods do, shows on top.
    for (const line of [...this.lines].sort((a, b) => b.baseline - a.baseline)) parts.push(this.drawLine(line));
    if (!this.lines.some(line => line.points.some(point => isNumber(point[1])))) {
      parts.push(drawn("text", {x: this.width / 2, y: floor / 2, "text-anchor": "middle"}, "no finite number yet"));
    }
    this.rule = drawn("line", {class: "cursor", y1: above, y2: floor, visibility: "hidden"});
    this.svg.replaceChildren(...parts, this.rule);
    if (this.cursor !== null) this.point(this.cursor);
  }

  drawLine(line) {
    const group = drawn("g", {style: `--run: ${line.colour}`, "data-run": line.label}), runs = [[]];
    for (const point of line.points) {
      if (isNumber(point[1]) && (!this.log || point[1] > 0)) runs[runs.length - 1].push(point);
      else {
        if (runs[runs.length - 1].length) group.append(this.cross(runs[runs.length - 1].at(-1)));
        runs.push([]);
      }
    }
    const at = (x, y) => `${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`;
    for (const points of runs.filter(one => one.length)) {
      const spread = points.filter(point => isNumber(point[2]) && isNumber(point[3]) && (!this.log || point[2] > 0));
      if (spread.length > 1) {
        const band = [...spread.map(p => at(p[0], p[3])), ...spread.reverse().map(p => at(p[0], p[2]))];
        group.prepend(drawn("polygon", {class: "band", points: band.join(" ")}));
      }
      const look = {class: line.baseline ? "line base" : "line", points: points.map(p => at(p[0], p[1])).join(" ")};
      if (line.dashes) look["stroke-dasharray"] = line.dashes;
      group.append(drawn("polyline", look));
      if (line.points.length <= 24) {
        const radius = line.baseline ? 4 : 2.6;
        for (const [x, y] of points) group.append(drawn("circle", {class: "dot", cx: this.x(x), cy: this.y(y), r: radius}));
      }
    }
    return group;
  }

  /** Where a run left the numbers behind. */
  cross([place, value]) {
    const x = this.x(place), y = this.y(value);
    const mark = drawn("path", {class: "lost", d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8`});
    mark.append(drawn("title", {}, "not finite from here on"));
    return mark;
  }

  // ------------------------------------------------------------- the reader

  /** Show the values at a place, beside an event or beside the place itself. */
  point(place, event = null) {
    this.cursor = place;
    const x = this.x(place);
    for (const name of ["x1", "x2"]) this.rule.setAttribute(name, x);
    this.rule.setAttribute("visibility", "visible");
    const box = this.svg.getBoundingClientRect();
    const rows = [];
    for (const line of this.lines) {
      const found = line.points.find(point => point[0] === place);
      if (found) rows.push([line.colour, line.label, this.shown(found[1])]);
    }
    const unit = {step: "batch", epoch: "epoch", update: "update"}[this.form.x] || this.form.x || "";
    const where = event || {clientX: box.left + x, clientY: box.top + 20};
    this.tip.list(where, `${unit} ${inWords(place, 9)}`, rows);
  }

  leave() {
    this.cursor = null;
    if (this.rule) this.rule.setAttribute("visibility", "hidden");
    this.tip.hide();
  }

  nearest(x) {
    const place = this.start + (x - this.edge.left) / (this.width - this.edge.left - this.edge.right) * (this.end - this.start);
    return this.places.reduce((best, one) => Math.abs(one - place) < Math.abs(best - place) ? one : best);
  }

  listen() {
    const follow = event => {
      if (this.places.length) this.point(this.nearest(event.clientX - this.svg.getBoundingClientRect().left), event);
    };
    this.svg.addEventListener("pointermove", follow);
    this.svg.addEventListener("pointerdown", follow);
    this.svg.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") this.leave(); });
    this.svg.addEventListener("blur", () => this.leave());
    this.svg.addEventListener("keydown", event => {
      const shift = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (event.key === "Escape") this.leave();
      if (!shift || !this.places.length) return;
      event.preventDefault();
      const now = this.cursor === null ? (shift > 0 ? -1 : this.places.length) : this.places.indexOf(this.cursor);
      this.point(this.places[Math.max(0, Math.min(this.places.length - 1, now + shift))]);
    });
  }
}
