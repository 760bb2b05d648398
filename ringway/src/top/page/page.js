// The page: asks its server once a second, and shows what it hears. All text from the daemon (names of
// disks are whatever somebody called a file) goes into the page as text, never as HTML.

import { HeatMap, LineChart, clock, count, el, mb, table, time } from "/charts.js";

const POINTS_MAX = 3600, EVENTS_MAX = 256;
const $ = (id) => document.getElementById(id);

const state = {
  begun: null, // which process serves this page
  since: 0, // the moment of the last answer that was heard
  answer: null,
  points: null,
  events: [],
  disk: null, // its number; null: all of them
  paused: false,
  cursor: null,
  pointed: null,
  asked: 0,
};

/* --- what is remembered of this browser's wishes */

function recall(name, fallback) {
  try { return localStorage.getItem(`ringway.${name}`) ?? fallback; } catch { return fallback; }
}

function remember(name, value) {
  try { localStorage.setItem(`ringway.${name}`, value); } catch { /* a browser that keeps nothing */ }
}

/* --- asking */

let timer = null, request = null;

/** Asks for all there is of the disk in view: `whole`, or only what is new. */
async function ask(whole = false) {
  clearTimeout(timer);
  request?.abort();
  const mine = (request = new AbortController());
  const patience = setTimeout(() => mine.abort(), 10e3);
  const begun = performance.now();
  if (whole) state.since = 0;
  const query = new URLSearchParams({ since: state.since });
  if (state.disk !== null) query.set("disk", state.disk);
  try {
    const response = await fetch(`/data?${query}`, { signal: mine.signal, cache: "no-store" });
    if (!response.ok) throw new Error(await response.text());
    const answer = await response.json();
    if (mine !== request) return;
    if (state.begun !== null && state.begun !== answer.begun && state.since > 0) {
      state.begun = answer.begun;
      return void ask(true);
    }
    hear(answer, state.since === 0);
  } catch (error) {
    if (mine !== request) return;
    unheard(error);
  } finally {
    clearTimeout(patience);
  }
  if (mine !== request || state.paused || document.hidden) return;
  const every = Math.min(Math.max(state.answer?.every_ms ?? 1000, 250), 5000);
  timer = setTimeout(ask, Math.max(50, every - (performance.now() - begun)));
}

/** Takes an answer in. */
function hear(answer, whole) {
  state.begun = answer.begun;
  state.since = answer.at;
  state.answer = answer;
  if (whole || !state.points) {
    [state.points, state.events] = [answer.points, answer.events];
  } else {
    for (const [key, values] of Object.entries(answer.points)) {
      state.points[key].push(...values);
      state.points[key].splice(0, state.points[key].length - POINTS_MAX);
    }
    state.events = state.events.concat(answer.events).slice(-EVENTS_MAX);
  }
  state.asked++;
  if (state.disk !== null && answer.daemon && !answer.disks.some(({ id }) => id === state.disk)) {
    return choose(null);
  }
  show();
}

/** The server of this page is not there. */
function unheard(error) {
  const why = error.name === "AbortError" ? "it does not answer" : error.message;
  status("lost", "page lost", `The server of this page (ringway top --serve) is not there: ${why}. ` +
    "What is shown is what was heard last; the page goes on by itself.");
}

function status(word, text, alert = null) {
  const { dataset } = $("status");
  if (dataset.state !== word) dataset.state = word;
  setText($("status"), text);
  document.body.classList.toggle("stale", word === "lost");
  if ($("alert").hidden !== !alert) $("alert").hidden = !alert;
  if (alert) setText($("alert"), alert);
  document.documentElement.style.setProperty("--head", `${$("status").parentElement.offsetHeight}px`);
}

/** Only what differs is written: screen readers and the layout are left alone otherwise. */
function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/* --- showing */

function show() {
  const { answer } = state;
  if (answer.lost !== null) {
    status("lost", "daemon lost", `The daemon does not answer, it is asked again and again: ${answer.lost}`);
  } else if (state.paused) status("paused", "paused");
  else status(answer.daemon ? "live" : "wait", answer.daemon ? "live" : "asking");
  const { daemon } = answer;
  setText($("daemon"), daemon
    ? `${answer.socket} · ringway ${daemon.version}, process ${daemon.pid}, up ${age(daemon.uptime_us / 1e6)}`
    : answer.socket);
  showDisks();
  showTitle();
  showTiles();
  showCharts();
  showDetail();
  showWorkers();
  showEvents();
}

function age(seconds) {
  const [m, h, d] = [60, 3600, 86400].map((unit) => Math.floor(seconds / unit));
  if (!m) return `${Math.floor(seconds)}s`;
  if (!h) return `${m}m ${Math.floor(seconds % 60)}s`;
  return d ? `${d}d ${h % 24}h` : `${h}h ${m % 60}m`;
}

const sum = (values) => values.reduce((a, b) => a + (b ?? 0), 0);
const mbOf = (disk) => (disk.iops === null ? null : disk.read_mb_s + disk.write_mb_s);
const isBad = (disk) => disk.overdue > 0 || disk.errors_s > 0 || ["stuck", "restarting", "held"].includes(disk.state);
const MARKS = { connected: "●", "at limit": "◐", serving: "○", paused: "❚", unlocked: "◇", leaving: "◁" };

/* --- the list of disks */

const rows = new Map(); // by number; null: all
let order = []; // as shown

function row(id) {
  let found = rows.get(id);
  if (!found) {
    const sign = el("i", { "aria-hidden": "true" });
    const name = el("bdi", {});
    const cells = [1, 2, 3].map(() => el("span", {}));
    const element = el("div", { class: "disk", role: "option", id: `disk-${id ?? "all"}`, "aria-selected": "false" },
      el("b", {}, sign, name), ...cells);
    element.addEventListener("click", () => choose(id));
    rows.set(id, (found = { element, sign, name, cells }));
  }
  return found;
}

function fillRow(id, { label, title, state: word, iops, mbs, p99, bad }) {
  const { element, sign, name, cells } = row(id);
  setText(sign, bad ? "▲" : MARKS[word] ?? "");
  setText(name, label);
  if (element.title !== title) element.title = title;
  if (element.dataset.state !== word) element.dataset.state = word;
  element.toggleAttribute("data-bad", bad);
  [count(iops), mb(mbs), time(p99)].forEach((text, at) => setText(cells[at], text));
  const chosen = String(state.disk === id);
  if (element.getAttribute("aria-selected") !== chosen) element.setAttribute("aria-selected", chosen);
}

function showDisks() {
  const { disks } = state.answer;
  const wanted = $("search").value.trim().toLowerCase();
  const found = disks.filter((disk) =>
    !wanted || disk.image.toLowerCase().includes(wanted) || String(disk.id) === wanted || disk.state === wanted);
  arrange(found);
  // The last part of a path says enough, as long as no other disk has the same.
  const short = (image) => image.slice(image.replace(/\/+$/, "").lastIndexOf("/") + 1);
  const names = new Map();
  for (const { image } of disks) names.set(short(image), (names.get(short(image)) ?? 0) + 1);
  const { points } = state;
  fillRow(null, {
    label: "All disks", title: "", state: "", bad: false,
    iops: sum(disks.map(({ iops }) => iops)), mbs: sum(disks.map(mbOf)),
    p99: state.disk === null ? points.p99.at(-1) ?? null : null,
  });
  // Images that are no files may be alike altogether: their numbers tell them apart.
  const images = new Map();
  for (const { image } of disks) images.set(image, (images.get(image) ?? 0) + 1);
  for (const disk of found) {
    const unique = names.get(short(disk.image)) > 1 ? disk.image : short(disk.image);
    const label = images.get(disk.image) > 1 ? `${disk.id} ${unique}` : unique;
    fillRow(disk.id, {
      label, title: `${disk.id} ${disk.image}, ${disk.state}`, state: disk.state, iops: disk.iops,
      mbs: mbOf(disk), p99: disk.p99, bad: isBad(disk),
    });
  }
  const here = new Set(disks.map(({ id }) => id));
  for (const id of rows.keys()) if (id !== null && !here.has(id)) rows.delete(id);
  setText($("found"), wanted ? `${found.length} of ${many(disks.length)}` : many(disks.length));
}

const many = (disks) => (disks === 1 ? "1 disk" : `${disks} disks`);

let arranged = "";

/** Puts the list in order; not under the pointer, where a click would meet another disk. */
function arrange(found) {
  const by = $("sort").value;
  const worth = { iops: (d) => d.iops ?? 0, mb: (d) => mbOf(d) ?? 0, p99: (d) => d.p99 ?? d.p50 ?? 0 }[by];
  const ids = new Set(found.map(({ id }) => id));
  const same = order.length === found.length && order.every((id) => ids.has(id));
  const busy = $("disks").matches(":hover, :focus");
  const wish = `${by} ${$("search").value}`;
  if (same && busy && wish === arranged) return;
  arranged = wish;
  found.sort(worth ? (a, b) => worth(b) - worth(a) || a.id - b.id
    : by === "image" ? (a, b) => a.image.localeCompare(b.image, undefined, { numeric: true }) || a.id - b.id
      : (a, b) => a.id - b.id);
  const next = found.map(({ id }) => id);
  if (same && next.every((id, at) => id === order[at])) return;
  order = next;
  const elements = [null, ...order].map((id) => row(id).element);
  if (!order.length) elements.push(el("p", { class: "none" }, $("search").value ? "No disk is called like this." : "No disks."));
  $("disks").replaceChildren(...elements);
}

/** Shows a disk, or all of them. */
function choose(id) {
  const changed = state.disk !== id;
  state.disk = id;
  $("disks").setAttribute("aria-activedescendant", `disk-${id ?? "all"}`);
  const hash = id === null ? "" : `#disk=${id}`;
  if (location.hash !== hash) history.replaceState(null, "", hash || location.pathname);
  for (const [other, { element }] of rows) element.setAttribute("aria-selected", String(other === id));
  rows.get(id)?.element.scrollIntoView({ block: "nearest" });
  if (!changed) return;
  state.points = null;
  setCursor(null, null);
  ask(true);
}

function step(by) {
  const all = [null, ...order];
  const at = all.indexOf(state.disk);
  choose(all[Math.min(Math.max(at + by, 0), all.length - 1)]);
}

/* --- the disk in view */

function showTitle() {
  const disk = state.answer.disks.find(({ id }) => id === state.disk);
  setText($("name"), disk ? disk.image : "All disks");
  $("state").hidden = !disk;
  if (disk) {
    setText($("state"), disk.state);
    $("state").dataset.state = disk.state;
    $("state").toggleAttribute("data-bad", isBad(disk));
  }
  const title = `${disk ? disk.image : many(state.answer.disks.length)} · ringway top`;
  if (document.title !== title) document.title = title;
}

const TILES = ["IOPS", "Read MB/s", "Write MB/s", "p50", "p99", "p99.9", "In flight", "Errors/s"].map((name) => {
  const value = el("dd", {}), tile = el("div", {}, el("dt", {}, name), value);
  value.dataset.tile = name;
  $("tiles").append(tile);
  return { tile, value };
});

function showTiles() {
  const { answer, points } = state;
  const disks = state.disk === null ? answer.disks : answer.disks.filter(({ id }) => id === state.disk);
  const told = (key) => (disks.some((disk) => disk[key] !== null) ? sum(disks.map((disk) => disk[key])) : null);
  const last = (key) => (state.disk === null ? points[key].at(-1) ?? null : disks[0]?.[key] ?? null);
  const errors = told("errors_s"), overdue = told("overdue");
  const flight = count(told("in_flight") ?? 0) + (overdue ? ` (${count(overdue)} overdue)` : "");
  const texts = [count(told("iops")), mb(told("read_mb_s")), mb(told("write_mb_s")),
    time(last("p50")), time(last("p99")), time(last("p999")), flight, count(errors)];
  TILES.forEach(({ value }, at) => setText(value, texts[at]));
  TILES[6].tile.toggleAttribute("data-bad", overdue > 0);
  TILES[7].tile.toggleAttribute("data-bad", errors > 0);
}

const keys = "Arrow keys read single moments.";
const reads = { key: "reads_s", label: "reads", look: "s1" };
const charts = [
  new LineChart($("charts"), {
    title: "IOPS", hint: keys, format: count, onCursor: setCursor,
    series: [reads, { key: "writes_s", label: "writes", look: "s2" }, { key: "others_s", label: "others", look: "s3 dots" }],
  }),
  new LineChart($("charts"), {
    title: "MB/s", hint: keys, format: mb, onCursor: setCursor,
    series: [{ key: "read_mb_s", label: "read", look: "s1" }, { key: "write_mb_s", label: "written", look: "s2" }],
  }),
  new LineChart($("charts"), {
    title: "Latency", hint: keys, format: time, log: true, onCursor: setCursor,
    series: [{ key: "p50", label: "p50", look: "s1" }, { key: "p99", label: "p99", look: "s2" }, { key: "p999", label: "p99.9", look: "s3 dash" }],
  }),
  new HeatMap($("charts"), { title: "Latency heat map", hint: `${keys} Up and down choose a latency.`, onCursor: setCursor }),
];

function setCursor(at, chart) {
  if (at === null && chart && state.pointed !== chart) return;
  [state.cursor, state.pointed] = [at, at === null ? null : chart];
  for (const one of charts) one.cursor(at, one === chart);
}

let ramp = [];

/** 32 shades of the theme in use, by the browser's own reading of the colours. */
function mixRamp() {
  const probe = el("span", {});
  document.body.append(probe);
  const stops = [0, 1, 2, 3, 4].map((at) => {
    probe.style.color = `var(--heat-${at})`;
    return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  });
  probe.remove();
  ramp = Array.from({ length: 32 }, (_, at) => {
    const place = (at / 31) * 4, low = Math.min(3, Math.floor(place));
    const mixed = stops[low].map((from, part) => Math.round(from + (stops[low + 1][part] - from) * (place - low)));
    return `rgb(${mixed.join(" ")})`;
  });
}

function showCharts() {
  const { answer, points } = state;
  if (!points) return;
  const to = answer.at, from = to - Number($("range").value) * 1e3;
  const view = { points, from, to, every: answer.every_ms, gap: 2.5 * answer.every_ms + 500, edges: answer.edges, ramp };
  for (const chart of charts) chart.draw(view);
}

/* --- details */

const exact = (n) => el("data", { value: n }, n.toLocaleString("en-US").replaceAll(",", "\u202f"));

function bytes(n) {
  const power = n < 1024 ? 0 : Math.min(6, Math.floor(Math.log2(n) / 10));
  const unit = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"][power];
  return `${Number((n / 1024 ** power).toFixed(2))} ${unit}`;
}

function showDetail() {
  const { detail } = state.answer;
  $("detail").hidden = !detail;
  if (!detail) return;
  const { figures, counts, failures } = detail;
  const line = (name, key, more = null) => {
    const value = exact(counts[key]);
    value.dataset.count = key;
    let size = "";
    if (more) {
      size = exact(counts[more]);
      size.dataset.count = more;
      size.title = bytes(counts[more]);
    }
    return [name, value, size];
  };
  $("counts").replaceChildren(table(["", "Requests", "Bytes"], [
    line("Reads", "reads", "read_bytes"), line("Writes", "writes", "written_bytes"), line("Flushes", "flushes"),
    line("Erases (discard, write zeroes)", "erases"), line("Errors", "errors"), line("  refused: the guest's mistakes", "refused"),
    line("  failed by the host's disk", "failed"), line("Merged into others", "merged"), line("Copied (bounced)", "bounced"),
    line("Found overdue", "overdue"), line("Held after a failure", "held"),
    line("Waits for a limit", "throttled"),
  ], "Requests since the disk was added"));
  showFacts(figures);
  keepScroll($("queues"), figures.queues.length ? queueTable(figures.queues) : el("p", { class: "hint" }, "No queue runs: no front-end has started one."));
  $("failed").hidden = !failures.length;
  if (failures.length) {
    keepScroll($("failures"), table(["Operation", "Times", "Sector", "Error, the latest"],
      failures.map((one) => [one.operation, exact(one.count), one.sector === null ? "-" : exact(one.sector), one.error]), "Failures"));
  }
}

function showFacts(figures) {
  const { path } = figures;
  const facts = [
    ["Number", String(figures.id)], ["Image", figures.image], ["Socket", figures.socket], ["Device", figures.device],
    ["Size", bytes(figures.size) + (figures.read_only ? ", read-only" : "")],
    ["Engine", `${figures.engine}: ${figures.engine_why}`], ["Cache", `${figures.cache}: ${figures.cache_why}`],
    ["Write cache", figures.write_cache ? "on" : "off"],
    ["Path", path.kind === path.in_use ? path.kind : `${path.kind}: ${path.in_use}`],
    ["Limits", limits(figures)],
  ].filter(([, value]) => value !== null);
  const text = JSON.stringify(facts);
  if ($("facts").dataset.text === text) return;
  $("facts").dataset.text = text;
  $("facts").replaceChildren(...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, el("bdi", {}, value))]));
}

/** The limits of a disk and its group, as `ringway ctl limit` takes them; none is null. */
function limits({ limits: own, limit_group: group }) {
  const all = Object.entries(own).map(([word, value]) => `${word} ${exact(value).textContent}`);
  if (group !== null) all.push(`group ${group}`);
  return all.length ? all.join(", ") : null;
}

function queueTable(queues) {
  const rate = (one, key) => one.rates?.[key] ?? null;
  return table(["Queue", "Worker", "In flight", "IOPS", "Read MB/s", "Write MB/s", "p50", "p99", "p99.9", "Kicks/s", "Calls/s"],
    queues.map((one) => [
      String(one.queue), one.worker + (one.broken ? " (broken by its guest)" : ""),
      `${one.in_flight} of ${one.queue_size}` + (one.held ? ` (${one.held} held)` : one.overdue ? ` (${one.overdue} overdue)` : ""), count(rate(one, "iops")),
      mb(rate(one, "read_mb_s")), mb(rate(one, "write_mb_s")), time(one.latency.p50), time(one.latency.p99),
      time(one.latency.p999), count(rate(one, "kicks_s")), count(rate(one, "calls_s")),
    ]), "Queues");
}

/** A new content that stays scrolled to where the old one was. */
function keepScroll(element, content) {
  const { scrollLeft, scrollTop } = element;
  element.replaceChildren(content);
  Object.assign(element, { scrollLeft, scrollTop });
}

function showWorkers() {
  const { workers, detail } = state.answer;
  const mine = detail && new Set(detail.figures.queues.map(({ worker }) => worker));
  const shown = mine?.size ? workers.filter(({ worker }) => mine.has(worker)) : workers;
  const part = (value) => (value === undefined ? "-" : `${Math.round(100 * value)} %`);
  const mean = (value) => value?.toFixed(2) ?? "-";
  keepScroll($("workers"), table(
    ["Worker", "Queues", "Requests/s", "Working, spinning", "Working", "Spinning", "Asleep", "Sleeps/s", "Requests/submit", "Syscalls/IO"],
    shown.map((one) => {
      const bar = el("div", { class: "bar", "aria-hidden": "true" }, el("span"), el("span"));
      bar.children[0].style.width = `${100 * (one.working ?? 0)}%`;
      bar.children[1].style.width = `${100 * (one.spinning ?? 0)}%`;
      return [one.answers ? one.worker : `${one.worker} does not answer`, String(one.queues), count(one.requests_s), bar,
        part(one.working), part(one.spinning), part(one.asleep), count(one.sleeps_s), mean(one.requests_per_submit), mean(one.syscalls_per_io)];
    }), "Workers"));
}

let eventsShown = "";

function showEvents() {
  const { events, disk } = state;
  const now = `${state.begun} ${disk} ${events.length} ${events.at(-1)?.at}`;
  if (now === eventsShown) return;
  eventsShown = now;
  const shown = events.filter((one) => disk === null || one.disk === null || one.disk === disk).reverse();
  const items = shown.map(({ at, kind, bad, of, text }) =>
    el("li", { "data-bad": bad ? "" : null }, el("time", { datetime: new Date(at).toISOString() }, clock(at)),
      el("b", {}, kind), el("span", {}, el("bdi", {}, of), text && ` · ${text}`)));
  if (!items.length) items.push(el("li", { class: "hint" }, "None since the page's server began to look."));
  $("events").replaceChildren(...items);
}

/* --- what people do */

function setPaused(paused) {
  state.paused = paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  if (paused) clearTimeout(timer);
  else ask();
  if (state.answer) show();
}

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  remember("theme", theme);
  mixRamp();
  showCharts();
}

const nextTheme = () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3]);

$("pause").addEventListener("click", () => setPaused(!state.paused));
$("theme").addEventListener("click", nextTheme);
$("help").addEventListener("click", () => $("keys").showModal());
$("search").addEventListener("input", () => state.answer && showDisks());
$("search").addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "Enter") {
    event.preventDefault();
    $("disks").focus();
    if (order.length && !order.includes(state.disk)) choose(order[0]);
  }
});
for (const id of ["sort", "range"]) {
  $(id).value = recall(id, { sort: "iops", range: "180" }[id]);
  if (!$(id).value) $(id).selectedIndex = 0;
  $(id).addEventListener("change", () => {
    remember(id, $(id).value);
    if (state.answer) show();
  });
}
$("disks").addEventListener("keydown", (event) => {
  const by = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  step(by);
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || $("keys").open || event.target.matches("input, select")) return;
  const act = {
    "/": () => $("search").focus(), "[": () => step(-1), "]": () => step(1), p: () => setPaused(!state.paused),
    t: nextTheme, "?": () => $("keys").showModal(),
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else if (!state.paused) ask();
});

function fromHash() {
  const found = location.hash.match(/^#disk=(\d+)$/);
  const id = found ? Number(found[1]) : null;
  if (id !== state.disk) choose(id);
}

addEventListener("hashchange", fromHash);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { mixRamp(); showCharts(); });

// What `location.hash` says is asked for first, so that a page that is loaded again shows the same disk.
const first = location.hash.match(/^#disk=(\d+)$/);
if (first) state.disk = Number(first[1]);
const theme = recall("theme", "auto");
setTheme(THEMES.includes(theme) ? theme : "auto");
ask(true);
