// Charts: a line chart, in SVG, and a heat map, on a canvas. Each can be read by pointer, by keyboard,
// and as a table. Text from the daemon goes into the page as text only.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 56, RIGHT = 8, TOP = 8, BOTTOM = 20;
const TABLE_ROWS = 60;

/** An element; strings among its children become text. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** 950, 23.45 k, 461.0 k, 4.61 M: as `ringway top` writes it. */
export function count(n) {
  if (n === null || n === undefined) return "-";
  if (n < 1e3) return n.toFixed(0);
  if (n < 1e5) return (n / 1e3).toFixed(2) + " k";
  if (n < 1e6) return (n / 1e3).toFixed(1) + " k";
  return (n / 1e6).toFixed(2) + " M";
}

/** 870 ns, 12.3 µs, 1.25 ms, 2.10 s */
export function time(nanos) {
  if (nanos === null || nanos === undefined) return "-";
  const short = (value, unit) =>
    value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0) + " " + unit;
  if (nanos < 1e3) return nanos.toFixed(0) + " ns";
  if (nanos < 999.5e3) return short(nanos / 1e3, "µs");
  if (nanos < 999.5e6) return short(nanos / 1e6, "ms");
  return short(nanos / 1e9, "s");
}

export const mb = (n) => (n === null || n === undefined ? "-" : n < 1e4 ? n.toFixed(1) : count(n));

/** As a mark on an axis: no digits that say nothing. */
const mark = (text) => text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

/** A latency in two figures: rows begin at powers of two. */
const rounded = (nanos) => mark(time(Number(nanos.toPrecision(2))));

export const clock = (at) => new Date(at).toTimeString().slice(0, 8);

/** A table of text: heads, and rows of text or elements. */
export function table(heads, rows, caption) {
  const head = el("tr", {}, ...heads.map((name) => el("th", { scope: "col" }, name)));
  const cell = (value, at) =>
    at === 0
      ? el("th", { scope: "row" }, value)
      : el("td", value instanceof Node ? {} : { class: /^[a-z]{2}/i.test(value) ? "words" : null }, value);
  const body = rows.map((row) => el("tr", {}, ...row.map(cell)));
  return el("table", { "aria-label": caption }, el("thead", {}, head), el("tbody", {}, ...body));
}

/** The first index whose moment is not before `at`. */
function lowerBound(moments, at) {
  let low = 0, high = moments.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (moments[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** What both kinds share: frame, legend, cursor, keys, table. */
class Chart {
  constructor(parent, title, hint, onCursor) {
    this.title = title;
    this.onCursor = onCursor;
    this.view = null;
    this.at = null;
    this.legend = el("div", { class: "legend" });
    this.button = el("button", { type: "button", "aria-pressed": "false" }, "Table");
    this.button.setAttribute("aria-label", `${title} as a table`);
    this.plot = el("div", { class: "plot", tabindex: "0", role: "img", "aria-roledescription": "chart" });
    this.rows = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, table` });
    this.rows.hidden = true;
    this.tip = el("div", { class: "tip", role: "status" });
    this.tip.hidden = true;
    this.empty = el("p", { class: "empty" }, "nothing yet");
    const head = el("div", {}, el("h3", {}, title), this.legend, this.button);
    parent.append(el("figure", { class: "chart", title: null }, head, this.plot, this.rows, this.tip));
    this.hint = hint;
    this.button.addEventListener("click", () => this.toggle());
    this.plot.addEventListener("pointermove", (event) => this.hover(event));
    this.plot.addEventListener("pointerleave", () => this.leave());
    this.plot.addEventListener("blur", () => this.leave());
    this.plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.view && this.draw(this.view)).observe(this.plot);
  }

  toggle() {
    const shown = this.rows.hidden;
    this.rows.hidden = !shown;
    this.plot.hidden = shown;
    this.button.setAttribute("aria-pressed", String(shown));
    if (this.view) this.draw(this.view);
  }

  /** Measures, and finds the points that are in the picture. */
  begin(view) {
    this.view = view;
    this.width = Math.max(this.plot.clientWidth, 120);
    this.height = this.plot.clientHeight || 200;
    this.first = lowerBound(view.points.at, view.from);
    this.last = lowerBound(view.points.at, view.to + 1);
    this.empty.hidden = this.last > this.first;
  }

  x(at) {
    const { from, to } = this.view;
    return LEFT + ((at - from) / (to - from)) * (this.width - LEFT - RIGHT);
  }

  /** Moments worth a mark, about one in 90 points of width. */
  marks() {
    const { from, to } = this.view;
    const wanted = ((to - from) / Math.max(2, (this.width - LEFT) / 90)) / 1000;
    const step = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800].find((s) => s >= wanted) ?? 3600;
    const marks = [];
    // Whole steps of local time.
    const shift = new Date(to).getTimezoneOffset() * 60e3;
    for (let at = Math.ceil((from - shift) / 1e3 / step) * step * 1e3 + shift; at <= to; at += step * 1e3) {
      marks.push({ at, text: step % 60 ? clock(at) : clock(at).slice(0, 5) });
    }
    return marks;
  }

  hover(event) {
    if (!this.view || this.last === this.first) return;
    const box = this.plot.getBoundingClientRect();
    const { from, to } = this.view;
    const part = (event.clientX - box.left - LEFT) / (this.width - LEFT - RIGHT);
    this.pointed(event.clientY - box.top);
    this.onCursor(from + part * (to - from), this);
  }

  /** Where the pointer is, from the top: for those who care. */
  pointed() {}

  leave() {
    this.onCursor(null, this);
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || this.last === this.first) return;
    const moments = this.view.points.at;
    const now = this.at === null ? this.last - 1 : this.index();
    const far = event.shiftKey ? 10 : 1;
    const to = {
      ArrowLeft: this.at === null ? now : now - far, ArrowRight: now + far,
      Home: this.first, End: this.last - 1,
    }[event.key];
    if (event.key === "Escape") this.leave();
    else if (to !== undefined) {
      this.onCursor(moments[Math.min(Math.max(to, this.first), this.last - 1)], this);
    } else if (!this.step(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Takes a key of its own; false if it has none. */
  step() {
    return false;
  }

  /** The point nearest to the cursor, or the latest. */
  index() {
    if (this.at === null) return this.last - 1;
    const moments = this.view.points.at;
    const next = lowerBound(moments, this.at);
    const at = next > this.first && (next >= this.last || this.at - moments[next - 1] < moments[next] - this.at)
      ? next - 1 : next;
    return Math.min(Math.max(at, this.first), this.last - 1);
  }

  /** Moves the cursor, or takes it away; `mine` if it is this chart that is pointed at. */
  cursor(at, mine) {
    this.at = at;
    if (!this.view) return;
    const shown = at !== null && this.last > this.first;
    this.point(shown ? this.index() : null);
    this.tip.hidden = !(shown && mine);
    if (this.tip.hidden) return;
    const text = this.tell(this.index());
    if (this.tip.textContent !== text) this.tip.textContent = text;
    const x = this.x(this.view.points.at[this.index()]) + 12;
    const right = x + this.tip.offsetWidth + 12 > this.width;
    this.tip.style.left = `${Math.max(0, right ? x - this.tip.offsetWidth - 8 : x + 12)}px`;
    this.tip.style.top = `${this.plot.offsetTop + 10}px`;
  }

  /** Points of the picture for a table, newest first, thinned out. */
  picked() {
    const step = Math.max(1, Math.ceil((this.last - this.first) / TABLE_ROWS));
    const picked = [];
    for (let at = this.last - 1; at >= this.first; at -= step) picked.push(at);
    return picked;
  }
}

/** Lines over time. `series`: [{ key, label, look }]. */
export class LineChart extends Chart {
  constructor(parent, { title, hint, series, format, log = false, onCursor }) {
    super(parent, title, hint, onCursor);
    Object.assign(this, { series, format, log });
    this.root = svg("svg", { "aria-hidden": "true" });
    this.back = svg("g");
    this.lines = series.map(({ look }) => svg("path", { class: `series ${look}` }));
    this.area = svg("path", { class: "area" });
    this.line = svg("line", { class: "cursor", visibility: "hidden" });
    this.dots = series.map(({ look }) => svg("circle", { class: `dot ${look}`, visibility: "hidden" }));
    this.root.append(this.back, this.area, ...this.lines.toReversed(), this.line, ...this.dots);
    this.plot.append(this.root, this.empty);
    this.values = series.map(({ label, look }) => {
      const value = el("b", {}, "-");
      const sample = svg("svg", { viewBox: "0 0 18 8", "aria-hidden": "true" },
        svg("path", { class: `series ${look}`, d: "M0 4H18" }));
      this.legend.append(el("span", {}, sample, label, value));
      return value;
    });
  }

  draw(view) {
    this.begin(view);
    if (!this.rows.hidden) return this.fillTable();
    this.scale();
    this.root.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.drawBack();
    this.series.forEach(({ key }, at) => this.lines[at].setAttribute("d", this.path(view.points[key])));
    this.area.setAttribute("d", this.log ? "" : this.path(view.points[this.series[0].key], true));
    const latest = this.series.map(({ key, label }) =>
      `${label} ${this.format(view.points[key][this.last - 1])}`);
    this.plot.setAttribute("aria-label", `${this.title}: ${latest.join(", ")}. ${this.hint}`);
    this.cursor(this.at, !this.tip.hidden);
  }

  /** What the axis goes from and to, and its marks. */
  scale() {
    let low = Infinity, high = 0;
    for (const { key } of this.series) {
      for (let at = this.first; at < this.last; at++) {
        const value = this.view.points[key][at];
        if (value === null) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (this.log) {
      if (high === 0) [low, high] = [1e3, 1e6];
      const steps = [];
      for (let decade = 1; decade < 1e12; decade *= 10) steps.push(decade, 2 * decade, 5 * decade);
      const from = steps.findLastIndex((step) => step <= Math.max(low, 1));
      let to = steps.findIndex((step) => step >= high);
      if (to - from < 3) to = from + 3;
      [this.low, this.high] = [steps[from], steps[to]];
      const all = steps.slice(from, to + 1);
      const decades = all.filter((step) => Math.log10(step) % 1 === 0);
      this.ticks = all.length <= 6 || decades.length < 2 ? all : decades;
    } else {
      const power = 10 ** Math.floor(Math.log10(Math.max(high, 4)));
      this.low = 0;
      this.high = power * ([1, 2, 4, 6, 8].find((factor) => factor * power >= Math.max(high, 4)) ?? 10);
      this.ticks = [0, 1, 2, 3, 4].map((quarter) => (quarter * this.high) / 4);
    }
  }

  y(value) {
    const part = this.log
      ? Math.log(Math.max(value, this.low) / this.low) / Math.log(this.high / this.low)
      : value / this.high;
    return this.height - BOTTOM - part * (this.height - TOP - BOTTOM);
  }

  drawBack() {
    const right = this.width - RIGHT;
    const rows = this.ticks.flatMap((value) => {
      const y = Math.round(this.y(value)) + 0.5;
      return [svg("line", { class: "grid", x1: LEFT, x2: right, y1: y, y2: y }),
        svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, mark(this.format(value)))];
    });
    const columns = this.marks().map(({ at, text }) => {
      const x = Math.min(Math.max(this.x(at), LEFT + 24), right - 24);
      return svg("text", { x, y: this.height - 5, "text-anchor": "middle" }, text);
    });
    this.back.replaceChildren(...rows, ...columns);
  }

  /** A line, with gaps where nothing was heard. */
  path(values, closed = false) {
    const { points, gap } = this.view;
    const floor = (this.height - BOTTOM).toFixed(1);
    let path = "", begun = null, before = null;
    const end = () => {
      if (closed && begun !== null) path += `V${floor}H${begun}Z`;
      begun = null;
    };
    for (let at = this.first; at < this.last; at++) {
      const value = values[at];
      if (value === null || (before !== null && points.at[at] - before > gap)) end();
      before = points.at[at];
      if (value === null) continue;
      const x = this.x(points.at[at]).toFixed(1), y = this.y(value).toFixed(1);
      // A point alone is seen by the round end of a line without length.
      path += begun === null ? `M${x} ${y}${closed ? "" : "h.01"}` : `L${x} ${y}`;
      begun ??= x;
    }
    end();
    return path;
  }

  point(index) {
    const { points } = this.view;
    const shown = index !== null;
    const latest = index ?? this.last - 1;
    this.series.forEach(({ key }, at) => {
      const value = latest >= this.first ? points[key][latest] : null;
      this.values[at].textContent = this.format(value);
      const seen = shown && value !== null;
      this.dots[at].setAttribute("visibility", seen ? "visible" : "hidden");
      if (seen) {
        this.dots[at].setAttribute("cx", this.x(points.at[index]));
        this.dots[at].setAttribute("cy", this.y(value));
      }
    });
    this.line.setAttribute("visibility", shown ? "visible" : "hidden");
    if (!shown) return;
    const x = Math.round(this.x(points.at[index])) + 0.5;
    fill(this.line, { x1: x, x2: x, y1: TOP, y2: this.height - BOTTOM }, []);
  }

  tell(index) {
    const { points } = this.view;
    const lines = this.series.map(({ key, label }) => `${label}  ${this.format(points[key][index])}`);
    return [clock(points.at[index]), ...lines].join("\n");
  }

  fillTable() {
    const { points } = this.view;
    const rows = this.picked().map((at) =>
      [clock(points.at[at]), ...this.series.map(({ key }) => this.format(points[key][at]))]);
    this.rows.replaceChildren(table(["Time", ...this.series.map(({ label }) => label)], rows, this.title));
    this.point(null);
  }
}

/** How many requests took how long, over time. */
export class HeatMap extends Chart {
  constructor(parent, { title, hint, onCursor }) {
    super(parent, title, hint, onCursor);
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.over = svg("svg", { "aria-hidden": "true" });
    this.back = svg("g");
    this.mark = svg("rect", { fill: "none", stroke: "currentColor", "stroke-width": 1.5, visibility: "hidden" });
    this.over.append(this.back, this.mark);
    this.plot.append(this.canvas, this.over, this.empty);
    this.legend.append(el("span", {}, "few", el("i", { class: "ramp" }), "many requests"));
    this.row = null;
  }

  draw(view) {
    this.begin(view);
    if (!this.rows.hidden) return this.fillTable();
    this.gather();
    this.paint();
    this.drawBack();
    const latest = this.last > this.first ? this.sum(this.last - 1) : 0;
    this.plot.setAttribute("aria-label", `${this.title}: ${latest} timed at last. ${this.hint}`);
    this.cursor(this.at, !this.tip.hidden);
  }

  /** Puts points into columns of at least three points of width, and finds the rows in use. */
  gather() {
    const { points, every } = this.view;
    const room = this.width - LEFT - RIGHT;
    const wide = (every / (this.view.to - this.view.from)) * room;
    this.join = Math.max(1, Math.ceil(3 / wide));
    let low = 47, high = 0;
    this.columns = new Map();
    for (let at = this.first; at < this.last; at++) {
      const slot = Math.floor(points.at[at] / (every * this.join));
      let column = this.columns.get(slot);
      if (!column) {
        // Each begins where the one before ends, unless nothing was heard in between.
        const before = points.at[at - 1] ?? 0;
        const from = points.at[at] - before <= this.view.gap ? before : points.at[at] - every;
        this.columns.set(slot, (column = { from, to: 0, cells: new Map() }));
      }
      column.to = points.at[at];
      for (const [row, number] of points.heat[at]) {
        column.cells.set(row, (column.cells.get(row) ?? 0) + number);
        low = Math.min(low, row);
        high = Math.max(high, row);
      }
    }
    if (low > high) [low, high] = [2, 13];
    while (high - low < 11) {
      if (low > 0) low--;
      if (high < 47) high++;
    }
    [this.low, this.high] = [low, high];
  }

  y(row) {
    const tall = (this.height - TOP - BOTTOM) / (this.high - this.low + 1);
    return this.height - BOTTOM - (row - this.low) * tall;
  }

  paint() {
    const scale = devicePixelRatio || 1;
    this.canvas.width = this.width * scale;
    this.canvas.height = this.height * scale;
    const context = this.canvas.getContext("2d");
    context.scale(scale, scale);
    let most = 1;
    for (const { cells } of this.columns.values()) for (const n of cells.values()) most = Math.max(most, n);
    for (const { from, to, cells } of this.columns.values()) {
      const left = Math.max(LEFT, Math.round(this.x(from)));
      const right = Math.max(left + 1, Math.round(this.x(to)));
      for (const [row, number] of cells) {
        const shade = Math.log1p(number) / Math.log1p(most);
        context.fillStyle = this.view.ramp[Math.round(shade * (this.view.ramp.length - 1))];
        const top = Math.round(this.y(row + 1));
        context.fillRect(left, top, right - left, Math.round(this.y(row)) - top);
      }
    }
  }

  drawBack() {
    fill(this.over, { viewBox: `0 0 ${this.width} ${this.height}` }, []);
    const { edges } = this.view;
    const step = this.high - this.low > 15 ? 4 : 2;
    const rows = [];
    for (let row = this.low + (this.low % 2); row <= this.high; row += step) {
      // Every second row begins at 1 µs times a power of two.
      const y = Math.round(this.y(row)) + 0.5;
      rows.push(svg("line", { class: "grid", x1: LEFT - 4, x2: LEFT, y1: y, y2: y }),
        svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, rounded(edges[row])));
    }
    const floor = this.height - BOTTOM + 0.5;
    rows.push(svg("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: floor, y2: floor }));
    const columns = this.marks().map(({ at, text }) => {
      const x = Math.min(Math.max(this.x(at), LEFT + 24), this.width - RIGHT - 24);
      return svg("text", { x, y: this.height - 5, "text-anchor": "middle" }, text);
    });
    this.back.replaceChildren(...rows, ...columns);
  }

  sum(index) {
    return this.view.points.heat[index].reduce((sum, [, number]) => sum + number, 0);
  }

  range(row) {
    const { edges } = this.view;
    if (row === 0) return `below ${time(edges[1])}`;
    return row + 1 < edges.length ? `${time(edges[row])} to ${time(edges[row + 1])}` : `over ${time(edges[row])}`;
  }

  pointed(y) {
    const tall = (this.height - TOP - BOTTOM) / (this.high - this.low + 1);
    const row = this.low + Math.floor((this.height - BOTTOM - y) / tall);
    this.row = Math.min(Math.max(row, this.low), this.high);
  }

  step(key) {
    const by = { ArrowUp: 1, ArrowDown: -1 }[key];
    if (!by) return false;
    const most = this.at === null ? null : this.most(this.index());
    const row = this.row ?? most ?? this.low;
    this.row = Math.min(Math.max(row + by, this.low), this.high);
    this.onCursor(this.at ?? this.view.points.at[this.last - 1], this);
    return true;
  }

  /** The row with the most requests at one moment. */
  most(index) {
    const cells = this.view.points.heat[index];
    return cells.length ? cells.reduce((a, b) => (b[1] > a[1] ? b : a))[0] : null;
  }

  column(index) {
    return this.columns.get(Math.floor(this.view.points.at[index] / (this.view.every * this.join)));
  }

  point(index) {
    const column = index === null ? null : this.column(index);
    this.mark.setAttribute("visibility", column ? "visible" : "hidden");
    if (!column) {
      if (index === null && this.at === null) this.row = null;
      return;
    }
    const row = this.row;
    const x = Math.max(LEFT, this.x(column.from)), top = row === null ? TOP : this.y(row + 1);
    const bottom = row === null ? this.height - BOTTOM : this.y(row);
    fill(this.mark, { x, y: top, width: Math.max(3, this.x(column.to) - x), height: bottom - top }, []);
  }

  tell(index) {
    const { from, to, cells } = this.column(index);
    const sum = [...cells.values()].reduce((a, b) => a + b, 0);
    const row = this.row ?? this.most(index);
    const lines = [`${clock(from)} to ${clock(to)}`, `${sum} timed`];
    if (row !== null) lines.push(`${cells.get(row) ?? 0} took ${this.range(row)}`);
    return lines.join("\n");
  }

  fillTable() {
    const { points } = this.view;
    const rows = this.picked().map((at) => {
      const cells = points.heat[at];
      if (!cells.length) return [clock(points.at[at]), "0", "-", "-", "-"];
      return [clock(points.at[at]), String(this.sum(at)), this.range(cells[0][0]),
        this.range(this.most(at)), this.range(cells[cells.length - 1][0])];
    });
    this.rows.replaceChildren(table(["Time", "Timed", "Fastest", "Most", "Slowest"], rows, this.title));
  }
}
