"use strict";
// Texts of the run enter the page by textContent only.
const $ = id => document.getElementById(id);
const head = JSON.parse($("json").textContent);
const ROW = 28, SOME_TOKENS = 4000, SOME_TEXT = 20000, SOME_MARKS = 500;
const TURNS = ["turns", "results"].filter(name => name in head.columns);
const CELLS = ["step", "kind", "task", "prompt_id", "group", "index", "reward", "verdict",
               "tokens", ...TURNS, "lag_max", "engine", "trained"];
const FILTERS = { step: "range", kind: "choice", set: "choice", task: "choice",
                  prompt_id: "range", reward: "range", verdict: "choice", tokens: "range",
                  ...Object.fromEntries(TURNS.map(name => [name, "range"])),
                  lag_max: "range", engine: "choice", trained: "choice" };
const COLOR = { correct: head.colors[2], wrong: head.colors[1] };  // of a verdict
const a = {}, cache = new Map(), decoder = new TextDecoder("utf-8", { ignoreBOM: true });
let rows = [], picked = -1, sorted = null, down = false;

// ---- data ----
async function unpack() {
  const text = $("data").textContent;
  $("data").remove();
  const packed = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text)  // newer browsers, faster
    : Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const types = { float64: Float64Array, int32: Int32Array, int16: Int16Array,
                  uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array };
  let at = 0;
  for (const [name, type, length] of head.arrays) {
    a[name] = new types[type](buffer, at, length);
    at += Math.ceil(a[name].byteLength / 8) * 8;
  }
}
function textAt(code) {
  if (code < 0) return null;
  if (!cache.has(code)) {
    const bytes = a.text_bytes.subarray(code ? a.text_ends[code - 1] : 0, a.text_ends[code]);
    const text = decoder.decode(bytes);
    if (bytes.length > 1000) return text;
    cache.set(code, text);
  }
  return cache.get(code);
}
const begin = row => row ? a.token_ends[row - 1] : 0;
const isText = name => name === "trained" || head.columns[name]?.[0] === "string";
function value(name, row) {
  if (name === "tokens") return a.token_ends[row] - begin(row);
  const x = a["column:" + name][row];
  if (name === "trained") {
    if (x === 1) return "trained";
    return value("kind", row) === "eval" ? "evaluation" : "dropped: " + value("dropped_because", row);
  }
  return isText(name) ? textAt(x) : Number.isNaN(x) ? null : x;
}
// Controls, and marks that turn the direction of what follows, are shown as their code.
const UNSEEN = new RegExp(head.unseen, "gu");
const visible = text => String(text ?? "").replace(UNSEEN, c =>
  "⟨U+" + c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩");
const number = x => x === null ? "" : String(Number.isInteger(x) ? x : Number(x.toPrecision(6)));
function shown(name, row) {
  const x = value(name, row);
  if (name === "unix_seconds" && x > 0 && x < 1e11) return new Date(x * 1000).toISOString();
  return isText(name) ? visible(x) : number(x);
}
const make = (tag, text, className = "") =>
  Object.assign(document.createElement(tag), { textContent: text, className });

// ---- filters and the address ----
function range(text) {
  if (text.trim() !== "" && Number.isFinite(Number(text))) return [Number(text), Number(text)];
  const parts = text.match(/^\s*(-?[\d.]*?)\s*(?:\.\.|-)\s*(-?[\d.]*)\s*$/);
  if (!parts || parts[1] + parts[2] === "") return null;
  const ends = [parts[1] === "" ? -Infinity : +parts[1], parts[2] === "" ? Infinity : +parts[2]];
  return ends.some(Number.isNaN) ? null : ends;
}
function makeFilters() {
  for (const [name, kind] of Object.entries(FILTERS)) {
    const label = make("label", name), field = make(kind === "choice" ? "select" : "input", "");
    if (kind === "choice") {
      const codes = new Set();
      for (let row = 0; row < head.rows; row++) codes.add(value(name, row));
      const choices = [...codes].map(code => code ?? "").sort();
      field.append(new Option("all", "*"));
      for (const choice of choices) field.append(new Option(visible(choice) || "(none)", choice));
    } else {
      field.placeholder = "all";
    }
    field.name = name;
    label.append(field);
    $("filters").append(label);
  }
}
const isSet = (field, kind) => field.value !== (kind === "choice" ? "*" : "");
function readAddress() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const [name, kind] of Object.entries(FILTERS)) {
    const field = $("filters").elements[name], given = wanted.get(name);
    field.value = given ?? (kind === "choice" ? "*" : "");
    if (kind === "choice" && field.selectedIndex < 0) {  // in a link to another part of the run
      field.append(new Option(visible(given), given));
      field.value = given;
    }
  }
  $("color").value = wanted.get("color") ?? "version";
  if ($("color").selectedIndex < 0) $("color").value = "version";
  picked = wanted.has("row") ? Number(wanted.get("row")) : -1;
  filter();
  pick(Number.isInteger(picked) && picked >= 0 && picked < head.rows ? picked : rows[0] ?? -1);
}
function writeAddress() {
  const now = new URLSearchParams();
  for (const [name, kind] of Object.entries(FILTERS)) {
    const field = $("filters").elements[name];
    if (isSet(field, kind)) now.set(name, field.value);
  }
  if ($("color").value !== "version") now.set("color", $("color").value);
  if (picked >= 0) now.set("row", picked);
  history.replaceState(null, "", "#" + now);
}
function filter() {
  const tests = [];
  for (const [name, kind] of Object.entries(FILTERS)) {
    const field = $("filters").elements[name], set = isSet(field, kind);
    const ends = set && kind === "range" ? range(field.value) : null;
    field.setAttribute("aria-invalid", set && kind === "range" && ends === null);
    if (set && kind === "choice") tests.push(row => (value(name, row) ?? "") === field.value);
    else if (ends) tests.push(row => {
      const x = value(name, row);
      return x !== null && x >= ends[0] && x <= ends[1];
    });
    else if (set) tests.push(() => false);
  }
  rows = [];
  for (let row = 0; row < head.rows; row++) if (tests.every(test => test(row))) rows.push(row);
  sort();
  $("count").textContent = `${rows.length} of ${head.rows} completions.`;
  document.documentElement.dataset.rows = rows.length;
  $("space").style.height = rows.length * ROW + "px";
  $("table").scrollTop = 0;
  drawTable();
}
function sort() {
  if (sorted === null) return;
  const keys = new Map(rows.map(row => [row, value(sorted, row)]));
  const order = (x, y) => x === y ? 0 : x === null ? 1 : y === null ? -1 : (x < y) !== down ? -1 : 1;
  rows.sort((x, y) => order(keys.get(x), keys.get(y)) || x - y);
}

// ---- table: only the rows in view are in the document ----
function drawTable() {
  const first = Math.max(0, Math.floor($("table").scrollTop / ROW) - 5);
  const part = rows.slice(first, first + Math.ceil($("table").clientHeight / ROW) + 10);
  $("space").replaceChildren(...part.map((row, i) => {
    const line = make("div", "", "row" + (row === picked ? " picked" : ""));
    line.style.top = (first + i) * ROW + "px";
    line.dataset.row = row;
    line.tabIndex = 0;
    for (const name of CELLS) {
      const cell = make("span", shown(name, row).slice(0, 200));
      if (name === "verdict") cell.style.boxShadow = `inset 4px 0 ${verdictColor(row)}`;
      line.append(cell);
    }
    return line;
  }));
}
const verdictColor = row => COLOR[value("verdict", row)] ?? "var(--gray)";

// ---- one completion ----
function textBlock(text, className = "") {
  const block = make("div", visible(text.slice(0, SOME_TEXT)), "text " + className);
  if (text.length <= SOME_TEXT) return [block];
  const more = make("button", `all ${text.length} characters`);
  more.onclick = () => { block.textContent = visible(text); more.remove(); };
  return [block, more];
}
const hasPrompt = row => head.origins[a.origins[begin(row)]] === "prompt" && value("tokens", row) > 0;
// A completion: one text, or the segments of its turns, one below the other.
function talk(row, withPrompt) {
  const blocks = [], start = begin(row), end = a.token_ends[row];
  if (withPrompt && !hasPrompt(row)) blocks.push(...textBlock(value("prompt", row) ?? "", "prompt"));
  let segment = row && a.segment_ends ? a.segment_ends[row - 1] : 0, turn = 0, own = false;
  if (segment === (a.segment_ends?.[row] ?? 0))
    return [...blocks, ...textBlock(value("completion", row) ?? "")];
  for (let from = start, to; from < end; from = to, segment++) {
    for (to = from + 1; to < end && a.origins[to] === a.origins[from];) to++;
    const origin = head.origins[a.origins[from]], continues = own;
    own = origin === "sampled" || origin === "forced";
    if (own && !continues) turn++;
    if (origin === "prompt" && from === start && !withPrompt) continue;
    const mark = head.marks[a.segment_marks[segment]];
    const role = { sampled: `Turn ${turn}${continues ? ", continued" : ""}`,
                   forced: `Forced into turn ${turn}`,
                   given: mark ? `Given, ${mark}` : "Given",
                   prompt: from === start ? "Prompt" : "Prompt of a sequence of its own" }[origin];
    const versions = [...new Set(a.versions.subarray(from, to))];
    const who = make("p", `${role}: ${to - from} tokens`, "note who");
    if (origin === "sampled")
      who.append(`, version${versions.length > 1 ? "s" : ""} ${versions.join(", ")} `);
    if (own && mark) who.append(make("b", mark));
    blocks.push(who, ...textBlock(textAt(a.segment_texts[segment]), origin));
  }
  return blocks;
}
function pick(row) {
  picked = row;
  $("detail").hidden = row < 0;
  if (row < 0) return;
  $("name").textContent = `Completion ${value("index", row)} of group ${value("group", row)}, ` +
    (value("kind", row) === "eval" ? `evaluation of version ${value("step", row)}`
                                   : `step ${value("step", row)}`);
  $("facts").replaceChildren();
  for (const name of [...Object.keys(head.columns), "tokens"]) {
    if (["prompt", "completion", "dropped_because"].includes(name)) continue;
    const key = make("dt", name);
    key.title = head.columns[name]?.[1] ?? "tokens of the completion";
    $("facts").append(make("div", ""));
    $("facts").lastChild.append(key, make("dd", shown(name, row)));
  }
  $("talk").replaceChildren(...talk(row, true));
  drawStrip();
  drawSame();
  drawTable();
}
function nats(steps) {
  if (steps === head.nan) return "not a number of";
  const text = (steps * head.step).toFixed(3);
  return steps === head.lowest ? `${text} or less` : text;
}
const ratio = steps => Number(Math.exp(steps * head.step).toPrecision(4));
const tint = (color, share) => `color-mix(in srgb, ${color} ${share}%, transparent)`;
const versionColor = version => tint(head.colors[version % head.colors.length], 32);
const shade = (color, nats, factor) => tint(color, Math.min(85, Math.round(nats * factor)));
// Color of a value by its steps, and the legend: values of the data in nats, with their texts.
const COLORS = {
  logprob: { of: steps => steps === head.nan ? head.colors[1]
               : shade(head.colors[3], -steps * head.step, 17),
             legend: [[0, "0 nats"], [-1, "-1 nats"], [-2, "-2 nats"], [-5, "-5 nats or less"]] },
  ratio: { of: steps => steps === head.nan ? ""
             : shade(head.colors[steps < 0 ? 0 : 1], Math.abs(steps * head.step), 250),
           legend: [0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.4].map(x =>
             [Math.log(x), `${x}${x === 0.7 ? " or less" : x === 1.4 ? " or more" : ""}`]) },
  entropy: { of: steps => steps === head.nan ? "" : shade(head.colors[3], steps * head.step, 40),
             legend: [[0, "0 nats"], [0.5, "0.5 nats"], [1, "1 nat"], [2, "2 nats or more"]] },
};
const ARRAYS = { version: "versions", logprob: "logprobs", ratio: "ratios", entropy: "entropies" };
function tokenText(word) {
  const code = a.pieces[word];
  return code < 0 ? `#${a.vocabulary[word]} ` : visible(textAt(code)) || "∅";
}
function drawStrip() {
  const from = begin(picked), end = a.token_ends[picked], prompt = a.prompt_of[picked];
  const first = prompt ? a.prompt_ends[prompt - 1] : 0, origins = a.origins.subarray(from, end);
  const size = hasPrompt(picked) ? 0 : a.prompt_ends[prompt] - first;
  const by = $("color").value, values = a[ARRAYS[by]], of = COLORS[by]?.of ?? versionColor;
  const own = values.subarray(from, end), versions = [...new Set(own)].slice(0, 40);
  let legend = COLORS[by]?.legend.map(([nats, text]) => [text, of(nats / head.step)]);
  legend ??= versions.map(version => [`version ${version}`, of(version)]);
  if (size || hasPrompt(picked)) legend.push(["prompt: gray", ""]);
  if (origins.includes(head.origins.indexOf("given"))) legend.push(["given: underlined", ""]);
  if (by !== "version" && own.every(steps => steps === head.nan)) legend = [["not trained", ""]];
  $("legend").replaceChildren(...legend.map(([text, color]) => {
    const sample = make("span", text);
    sample.style.background = color;
    return sample;
  }));
  $("strip").replaceChildren();
  const more = at => {
    const part = document.createDocumentFragment(), stop = Math.min(end, at + SOME_TOKENS);
    for (let token = at; token < stop; token++) {
      if (token < from) {
        const word = a.prompt_tokens[first + token - from + size];
        part.append(make("span", tokenText(word), "token prompt"));
        part.lastChild.title = `token ${token - from + size} of the prompt: id ${a.vocabulary[word]}`;
        continue;
      }
      const origin = head.origins[a.origins[token]];
      const span = make("span", tokenText(a.tokens[token]), `token ${origin}`);
      span.dataset.token = token;
      if (origin !== "prompt") span.style.background = of(values[token]);
      part.append(span);
    }
    $("strip").append(part);
    if (stop === end) return;
    const next = make("button", `${end - stop} more tokens`);
    next.onclick = () => { next.remove(); more(stop); };
    $("strip").append(next);
  };
  more(from - size);
}
function tellToken(event) {
  const span = event.target.closest(".token");
  if (!span) return;
  const token = Number(span.dataset.token), ratios = a.ratios?.[token] ?? head.nan;
  const entropy = a.entropies?.[token] ?? head.nan;
  if (token >= 0) span.title =
    `token ${token - begin(picked)}: id ${a.vocabulary[a.tokens[token]]}, ` +
    `weight version ${a.versions[token]}, log-prob ${nats(a.logprobs[token])} nats` +
    (ratios === head.nan ? "" : `, ratio ${ratio(ratios)}`) +
    (entropy === head.nan ? "" : `, entropy ${nats(entropy)} nats`) +
    (a.origins[token] ? `, ${head.origins[a.origins[token]]}, not sampled` : "");
  $("hover").textContent = `${span.title}: ${JSON.stringify(span.textContent)}`;
}
function alike(names) {
  const columns = names.map(name => a["column:" + name]), same = [];
  for (let row = 0; row < head.rows; row++)
    if (columns.every(column => column[row] === column[picked])) same.push(row);
  return same;
}
function drawSame() {
  const same = alike(["kind", "set", "prompt_id"]);
  same.sort((x, y) => value("step", x) - value("step", y) || x - y);
  $("same").replaceChildren(...same.slice(0, SOME_MARKS).map(row => {
    const mark = make("button", `${value("step", row)}: ${number(value("reward", row))}`,
                      row === picked ? "picked" : "");
    mark.title = `step ${value("step", row)}, ${shown("verdict", row)}, ${value("tokens", row)} tokens`;
    mark.style.borderLeftColor = verdictColor(row);
    mark.onclick = () => choose(row);
    return mark;
  }));
  if (same.length > SOME_MARKS)
    $("same").append(make("span", `and ${same.length - SOME_MARKS} more: filter by prompt_id`));
  $("group").replaceChildren(...alike(["kind", "step", "set", "group"]).map(row => {
    const card = make("div", ""), open = make("button", `${value("index", row)}: ` +
      `${shown("verdict", row)}, reward ${number(value("reward", row))}, ${value("tokens", row)} tokens`);
    open.onclick = () => choose(row);
    card.append(open, ...talk(row, false));
    return card;
  }));
}
function choose(row) { pick(row); writeAddress(); }

// ---- start ----
async function start() {
  $("title").textContent = document.title = visible(head.title);
  await unpack();
  $("about").textContent = visible(head.state);
  document.body.style.setProperty("--turns", TURNS.map(() => "72px").join(" "));
  for (const name of CELLS) {
    const cell = make("span", name);
    cell.title = head.columns[name]?.[1] ?? "tokens of the completion";
    cell.onclick = () => { down = sorted === name && !down; sorted = name; filter(); };
    $("head").append(cell);
  }
  for (const option of [...$("color").options]) if (!a[ARRAYS[option.value]]) option.remove();
  makeFilters();
  readAddress();
  window.onhashchange = readAddress;
  $("filters").onsubmit = event => event.preventDefault();
  $("filters").oninput = () => { filter(); pick(rows[0] ?? -1); writeAddress(); };
  $("clear").onclick = () => { location.hash = ""; };
  $("color").onchange = () => { drawStrip(); writeAddress(); };
  $("table").onscroll = window.onresize = drawTable;
  $("space").onclick = event => {
    const line = event.target.closest(".row");
    if (line) choose(Number(line.dataset.row));
  };
  $("space").onkeydown = event => { if (event.key === "Enter") event.target.click(); };
  $("strip").onpointerover = $("strip").onclick = tellToken;
  await new Promise(requestAnimationFrame);
  document.documentElement.dataset.ready = Math.round(performance.now());
}
start().catch(error => {
  $("about").className = "error";
  $("about").textContent = `This browser cannot show the page (${error}): it needs ` +
    "Chrome 111, Firefox 113, Safari 16.4, or newer.";
  throw error;
});
