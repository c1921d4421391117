// The page: state in the URL's hash, so that a view can be linked (#pass=15&node=layers.0.attn.qkv&theme=dark).

const DATA = JSON.parse(document.getElementById("data").textContent), S = DATA.strings;
const $ = id => document.getElementById(id);
const esc = text => String(text).replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[c]);
const NS = "http://www.w3.org/2000/svg";
const cut = (text, n) => text.length > n ? text.slice(0, n - 1) + "…" : text;
const bytes = n => { let u = 0; while (n >= 1024 && u < 3) { n /= 1024; u++; } return `${u && n < 100 ? n.toFixed(1) : Math.round(n)} ${["B", "KiB", "MiB", "GiB"][u]}`; };
const short = n => n >= 1e6 ? (n / 1e6).toFixed(1) + " M" : n >= 1e3 ? (n / 1e3).toFixed(n < 1e4 ? 1 : 0) + " k" : String(n);
const TABS = [["graph", "Graph"], ["cascade", "Cascade"], ["kv", "KV cache"], ["kernels", "Kernels"], ["pipeline", "Passes"]].filter(([id]) => id !== "kernels" || DATA.kernels);
const state = {tab: "graph", pass: DATA.stages.length - 1, program: "", node: "", theme: "", open: new Set(), unrolled: false, query: ""};
const view = {x: 0, y: 0, k: 1};
let model = null, scene = null;

// --- the graph of a pass, in groups ---

const CATEGORY = [[/attention|sdpa|softmax|matmul|mask/, "attention"], [/linear|gated/, "linear"], [/norm/, "norm"], [/kv|page/, "kv"], [/quantise/, "quant"], [/reshape|transpose|slice|cat|expand|gather|cast|broadcast/, "shape"], [/input|embed|argmax/, "io"]];
const category = op => (CATEGORY.find(([re]) => re.test(op)) || [0, "math"])[1];
const layerOf = name => { const m = /(?:^|\.)layers\.(\d+)(?:\.|$)/.exec(name); return m ? +m[1] : -1; };

function programAt(pass) { return DATA.stages[pass].programs[state.program]; }

function loadModel() {
  const program = programAt(state.pass);
  const nodes = new Map(), users = new Map(), status = new Map();
  for (const index of program?.nodes ?? []) {
    const [name, op, attrs, inputs, type, origin, size] = DATA.nodes[index];
    nodes.set(S[name], {name: S[name], op: S[op], attrs: S[attrs], inputs: inputs.map(i => S[i]), type: S[type], origin: S[origin], size, index});
    users.set(S[name], []);
  }
  for (const n of nodes.values()) for (const i of new Set(n.inputs)) users.get(i)?.push(n.name);
  for (const kind of ["added", "changed"]) for (const i of program?.[kind] ?? []) status.set(S[i], kind);
  const heirs = new Map(Object.entries(program?.heirs ?? {}).map(([heir, gone]) => [S[heir], gone.map(i => S[i])]));
  for (const heir of heirs.keys()) status.set(heir, "fused");
  const orphans = new Set((program?.removed ?? []).map(i => S[i]));
  for (const gone of heirs.values()) gone.forEach(name => orphans.delete(name));
  const groups = new Map(), where = new Map(), deep = new Set();
  const group = id => { if (!groups.has(id)) groups.set(id, {id, nodes: [], gone: []}); return groups.get(id); };
  group("entry");
  for (const n of nodes.values()) {
    if (n.op === "weight") continue;
    const layer = layerOf(n.name);
    if (layer >= 0 || n.inputs.some(i => deep.has(i))) deep.add(n.name);
    const id = layer >= 0 ? `layer ${layer}` : deep.has(n.name) ? "head" : "entry";
    where.set(n.name, id);
    if (id !== "head") group(id).nodes.push(n);
  }
  const layers = [...groups.values()].filter(g => g.id !== "entry").sort((a, b) => layerOf("layers." + a.id.slice(6)) - layerOf("layers." + b.id.slice(6)));
  const head = {id: "head", nodes: [...nodes.values()].filter(n => where.get(n.name) === "head"), gone: []};
  const ordered = [groups.get("entry"), ...layers, head].filter(g => g.nodes.length);
  for (const name of orphans) { const layer = layerOf(name), g = ordered.find(x => x.id === `layer ${layer}`) || ordered[0]; if (g && !name.startsWith("w.")) g.gone.push(name); }
  const weights = [...status].filter(([name]) => nodes.get(name)?.op === "weight").map(([name]) => name);
  model = {program, nodes, users, status, heirs, groups: ordered, where, outputs: new Map((program?.outputs ?? []).map(([r, v]) => [v, r])), weights};
  for (const g of ordered) g.sign = signature(g);
}

const relative = (name, layer) => name.replace(/layers\.(\d+)/, (_, n) => `layers.${+n - layer}`);

function signature(g) { // two layers with one signature look alike, whatever their numbers
  const layer = g.id.startsWith("layer") ? +g.id.slice(6) : 0;
  if (!g.id.startsWith("layer")) return g.id;
  return g.nodes.map(n => [relative(n.name, layer), n.op, n.attrs.replace(/layer=\d+/, ""), n.type, n.inputs.map(i => model.nodes.get(i)?.op === "weight" ? "w" : layer && layerOf(i) < 0 ? "·" : relative(i, layer)), model.status.get(n.name), (model.heirs.get(n.name) || []).length].join("|")).join("\n") + g.gone.length;
}

function weightsOf(n) { return n.inputs.filter(i => model.nodes.get(i)?.op === "weight"); }
function cardHeight(n) { return 44 + 18 * weightsOf(n).length + (model.heirs.has(n.name) ? 16 : 0); }

const layouts = new Map();

function groupLayout(g) {
  const own = new Set(g.nodes.map(n => n.name)), heights = {}, ports = new Map(), list = [];
  for (const n of g.nodes) for (const i of n.inputs)
    if (!own.has(i) && model.nodes.get(i)?.op !== "weight" && !ports.has(i)) { ports.set(i, `→${i}`); list.push({id: `→${i}`, inputs: [], pin: "top"}); heights[`→${i}`] = PORT_H; }
  for (const n of g.nodes) {
    heights[n.name] = cardHeight(n);
    list.push({id: n.name, inputs: n.inputs.filter(i => model.nodes.get(i)?.op !== "weight").map(i => ports.get(i) ?? i)});
  }
  const last = g === model.groups[model.groups.length - 1], leaving = g.nodes.filter(n => !last && model.users.get(n.name).some(u => !own.has(u) && model.where.has(u)));
  for (const n of leaving) { list.push({id: `⇣${n.name}`, inputs: [n.name], pin: "bottom"}); heights[`⇣${n.name}`] = PORT_H; }
  const key = JSON.stringify([g.sign, list.map(n => [n.pin, n.inputs.map(i => list.findIndex(m => m.id === i)), heights[n.id]])]);
  let shared = layouts.get(key);
  if (!shared) {
    const number = new Map(list.map((n, i) => [n.id, i]));
    shared = layeredLayout(list.map(n => ({id: number.get(n.id), inputs: n.inputs.map(i => number.get(i)), pin: n.pin})), list.map(n => heights[n.id]));
    layouts.set(key, shared);
  }
  const place = {};
  list.forEach((n, i) => { place[n.id] = shared.place[i]; });
  return {place, ports: [...ports, ...leaving.map(n => [n.name, `⇣${n.name}`])], heights, width: Math.max(shared.width, 330), height: shared.height, shift: Math.max(0, (330 - shared.width) / 2),
    edges: shared.edges.map(e => ({from: list[e.from].id, to: list[e.to].id, points: e.points}))};
}

// --- the scene: boxes with places, culled to what is seen ---

const PAD = 22, BAR = 36, FOLDED = 400;

function buildScene() {
  const boxes = []; let y = 0, last = null;
  const groups = model.groups, fold = g => !state.open.has(g.id);
  for (let i = 0; i < groups.length; i++) {
    const g = groups[i];
    let run = 1;
    if (!state.unrolled && g.id.startsWith("layer") && fold(g)) while (i + run < groups.length && groups[i + run].sign === g.sign && fold(groups[i + run])) run++;
    if (run >= 3) { boxes.push({kind: "run", groups: groups.slice(i, i + run), x: -FOLDED / 2, y, w: FOLDED, h: 74}); y += 74 + 44; i += run - 1; continue; }
    if (fold(g)) { boxes.push({kind: "folded", g, groups: [g], x: -FOLDED / 2, y, w: FOLDED, h: 56}); y += 56 + 34; continue; }
    const layout = groupLayout(g), gone = g.gone.length ? 16 + 24 * Math.ceil(g.gone.length / Math.max(1, Math.floor(layout.width / 240))) : 0;
    const w = layout.width + 2 * PAD, h = layout.height + BAR + 2 * PAD + gone;
    boxes.push({kind: "open", g, groups: [g], layout, x: -w / 2, y, w, h}); y += h + 52;
  }
  const home = new Map();
  for (const box of boxes) for (const g of box.groups) home.set(g.id, box);
  const links = [];
  for (let i = 1; i < boxes.length; i++) {
    const to = boxes[i], from = boxes[i - 1], crossing = new Set();
    const inside = new Set(from.groups.map(g => g.id));
    for (const g of to.groups.slice(0, 1)) for (const n of g.nodes) for (const v of n.inputs) if (inside.has(model.where.get(v))) crossing.add(v);
    const values = [...crossing];
    values.forEach((value, k) => {
      const spreadX = (k - (values.length - 1) / 2) * 150;
      const start = from.kind === "open" ? anchor(from, `⇣${value}`, true) : [from.x + from.w / 2 + spreadX * .55, from.y + from.h];
      const end = to.kind === "open" ? anchor(to, `→${value}`, false) : [to.x + to.w / 2 + spreadX * .55, to.y];
      links.push({value, points: [start, end], open: from.kind === "open" || to.kind === "open"});
    });
  }
  scene = {boxes, links, home, height: y, width: Math.max(FOLDED, ...boxes.map(b => b.w))};
}

function anchor(box, id, bottom) {
  const at = box.layout.place[id]; if (!at) return [box.x + box.w / 2, bottom ? box.y + box.h : box.y];
  return [box.x + PAD + box.layout.shift + at[0], box.y + BAR + PAD + at[1] + (bottom ? box.layout.heights[id] : 0)];
}

const el = (name, attrs, parent, text) => { const e = document.createElementNS(NS, name); for (const k in attrs) e.setAttribute(k, attrs[k]); if (text !== undefined) e.textContent = text; parent?.append(e); return e; };
const inner = (name, n) => { const m = /(?:^|\.)layers\.\d+\.(.+)$/.exec(name); return m ? m[1] : name.replace(/^model\./, ""); };
const shapeText = type => type.replace(/^(\w+)\[(.*)\]$/, (_, d, s) => `${d} ${s.replace(/, /g, "×")}`).replace(/^kv<.*$/, "kv");

const label = (name, shown) => { const shape = shapeText(model.nodes.get(name).type); return shape === shown ? shown : `${shown}  ${shape}`; };

function draw() {
  const cards = $("cards"), edges = $("edges"), canvas = $("canvas");
  const {width, height} = canvas.getBoundingClientRect();
  const seen = {x0: -view.x / view.k - 60, y0: -view.y / view.k - 60, x1: (width - view.x) / view.k + 60, y1: (height - view.y) / view.k + 60};
  const visible = (x, y, w, h) => x < seen.x1 && x + w > seen.x0 && y < seen.y1 && y + h > seen.y0;
  $("world").setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.k})`);
  $("world").classList.toggle("far", view.k < .3);
  cards.replaceChildren(); edges.replaceChildren();
  const back = el("g", {}, cards), front = document.createDocumentFragment(), wires = el("g", {}, cards);
  for (const link of scene.links) {
    const [[x0, y0], [x1, y1]] = link.points;
    if (!visible(Math.min(x0, x1), y0, Math.abs(x1 - x0) + 1, y1 - y0)) continue;
    el("path", {d: curve(link.points), class: `edge${link.value === state.node ? " hot" : ""}`}, wires);
    if (view.k >= .3 && !link.open) el("text", {x: (x0 + x1) / 2, y: (y0 + y1) / 2 + 3, class: "shape"}, wires, cut(label(link.value, inner(link.value)), 44));
  }
  for (const box of scene.boxes) {
    if (!visible(box.x, box.y, box.w, box.h + 20)) continue;
    if (box.kind !== "open") { drawFolded(box, back); continue; }
    const g = el("g", {class: "group"}, back), {x, y, w, h} = box;
    el("rect", {x, y, width: w, height: h, rx: 16}, g);
    const bar = el("g", {class: "bar", "data-toggle": box.g.id}, g);
    el("rect", {x: x + 1, y: y + 1, width: w - 2, height: BAR, rx: 15}, bar);
    el("path", {class: "chev", d: `M${x + 18} ${y + 15}l5 5 5-5`}, bar);
    el("text", {x: x + 36, y: y + 23, class: "name"}, bar, title(box.g));
    el("text", {x: x + w - 16, y: y + 23, class: "sub", "text-anchor": "end"}, bar, summary(box.g));
    const dx = x + PAD + box.layout.shift, dy = y + BAR + PAD;
    for (const e of box.layout.edges) {
      const points = e.points.map(([px, py]) => [px + dx, py + dy]);
      const ys = points.map(p => p[1]), xs = points.map(p => p[0]);
      if (!visible(Math.min(...xs), Math.min(...ys), Math.max(...xs) - Math.min(...xs) + 1, Math.max(...ys) - Math.min(...ys) + 1)) continue;
      const value = e.from.replace(/^→/, ""), lit = value === state.node || e.to === state.node;
      el("path", {d: curve(points), class: `edge${lit ? " hot" : ""}`}, g);
      if (view.k >= .3 && !e.from.startsWith("→") && !e.to.startsWith("⇣")) el("text", {x: (points[0][0] + points[1][0]) / 2, y: (points[0][1] + points[1][1]) / 2 + 3, class: `shape${lit ? " hot" : ""}`}, g, shapeText(model.nodes.get(value).type));
    }
    for (const [value, id] of box.layout.ports) {
      const [px, py] = box.layout.place[id];
      const text = cut(label(value, `${layerOf(value) >= 0 && !id.startsWith("⇣") ? `${layerOf(value)}.` : ""}${inner(value)}`), 34), pw = Math.max(70, text.length * 6.1 + 16);
      const port = el("g", {class: "port", "data-node": value}, front);
      el("rect", {x: dx + px - pw / 2, y: dy + py, width: pw, height: PORT_H, rx: 11}, port);
      el("text", {x: dx + px, y: dy + py + 15}, port, text);
    }
    for (const n of box.g.nodes) {
      const [cx, cy] = box.layout.place[n.name];
      if (visible(dx + cx - CARD / 2, dy + cy, CARD, box.layout.heights[n.name])) drawCard(n, dx + cx - CARD / 2, dy + cy, box.layout.heights[n.name], front);
    }
    box.g.gone.forEach((name, k) => {
      const columns = Math.max(1, Math.floor(box.layout.width / 240)), gx = x + PAD + (k % columns) * 240, gy = y + h - PAD - 24 * Math.ceil(box.g.gone.length / columns) + 24 * Math.floor(k / columns) + 8;
      const ghost = el("g", {class: "ghost"}, front);
      el("rect", {x: gx, y: gy, width: 230, height: 20, rx: 6}, ghost); el("text", {x: gx + 9, y: gy + 14}, ghost, cut(`− ${inner(name)}`, 34));
    });
  }
  cards.append(front);
}

function title(g) { return {entry: "inputs and embedding", head: "norm, head and choice"}[g.id] ?? g.id; }
function summary(g) { const weights = g.nodes.flatMap(weightsOf).reduce((sum, w) => sum + model.nodes.get(w).size, 0); return `${g.nodes.length} nodes${weights ? ` · ${short(weights)} weights` : ""}`; }
function tally(groups) { const c = {added: 0, changed: 0, fused: 0, removed: 0}; for (const g of groups) { for (const n of g.nodes) { const s = model.status.get(n.name); if (s) c[s]++; c.removed += (model.heirs.get(n.name) || []).length; } c.removed += g.gone.length; } return c; }

function drawFolded(box, parent) {
  const {x, y, w, h} = box, run = box.kind === "run", g = el("g", {class: "group folded", "data-toggle": run ? "run" : box.g.id}, parent);
  if (run) for (const d of [10, 5]) el("rect", {x: x + d, y: y + d, width: w - 2 * d, height: h, rx: 13}, g);
  el("rect", {x, y, width: w, height: h, rx: 13, class: "top"}, g);
  el("path", {class: "chev", d: `M${x + 20} ${y + h / 2 - 5}l5 5-5 5`}, g);
  const first = box.groups[0], lastG = box.groups[box.groups.length - 1];
  el("text", {x: x + 40, y: y + (run ? 31 : 24), class: "name"}, g, run ? `layers ${first.id.slice(6)} – ${lastG.id.slice(6)}` : title(first));
  el("text", {x: x + 40, y: y + (run ? 51 : 42), class: "sub"}, g, run ? `${box.groups.length} alike, each with ${summary(first).replace(" · ", " and ")}` : summary(first));
  let at = x + w - 18;
  const counts = tally(box.groups);
  for (const [kind, sign] of [["removed", "−"], ["fused", "◆"], ["changed", "~"], ["added", "+"]]) {
    if (!counts[kind]) continue;
    const text = `${sign}${counts[kind]}`;
    el("text", {x: at, y: y + h / 2 + 4, "text-anchor": "end", style: `font:600 11.5px var(--mono);fill:var(--${kind})`}, g, text); at -= text.length * 7.2 + 12;
  }
}

function drawCard(n, x, y, h, parent) {
  const g = el("g", {class: `card ${model.status.get(n.name) ?? ""}${n.name === state.node ? " sel" : ""}${state.query && matches(n) ? " hit" : ""}`, "data-node": n.name}, parent);
  el("rect", {x, y, width: CARD, height: h, rx: 9, class: "box"}, g);
  el("rect", {x: x + 6, y: y + 8, width: 3.5, height: h - 16, rx: 2, style: `fill:var(--${category(n.op)})`}, g);
  el("text", {x: x + 18, y: y + 19, class: "name"}, g, cut(inner(n.name), 27));
  el("text", {x: x + 18, y: y + 34, class: "op"}, g, cut(`${n.op}  ${shapeText(n.type)}`, 32));
  let at = y + 42;
  for (const w of weightsOf(n)) {
    const weight = model.nodes.get(w);
    el("rect", {x: x + 16, y: at, width: CARD - 24, height: 15, rx: 5, class: "w"}, g);
    el("text", {x: x + 22, y: at + 11, class: "w"}, g, cut(`▪ ${inner(w.replace(/^w\./, ""))}  ${shapeText(weight.type)}`, 32)); at += 18;
  }
  const gone = model.heirs.get(n.name);
  if (gone) el("text", {x: x + 18, y: at + 10, class: "gone"}, g, cut(`◆ was ${gone.length + (model.status.get(n.name) === "fused" && DATA.stages[state.pass - 1] ? 1 : 0)} nodes: ${gone.map(v => inner(v).split(".").pop()).join(", ")}`, 33));
  const out = model.outputs.get(n.name);
  if (out) el("text", {x: x + CARD - 9, y: y + 19, class: "op", "text-anchor": "end", style: "fill:var(--io);font-weight:600"}, g, `↳ ${out}`);
}

let waiting = false;
function redraw() { if (!waiting) { waiting = true; requestAnimationFrame(() => { waiting = false; draw(); }); } }

function fit() {
  const {width, height} = $("canvas").getBoundingClientRect();
  if (!width) return;
  view.k = Math.max(.05, Math.min(1.05, (width - 60) / scene.width));
  view.x = width / 2; view.y = 30;
  if (scene.height * view.k < height - 60) view.y = (height - scene.height * view.k) / 2 + 14;
}

function zoom(factor, cx, cy) {
  const {width, height} = $("canvas").getBoundingClientRect(), x = cx ?? width / 2, y = cy ?? height / 2, k = Math.max(.04, Math.min(3, view.k * factor));
  view.x = x - (x - view.x) * k / view.k; view.y = y - (y - view.y) * k / view.k; view.k = k; redraw();
}

function centre(name) {
  const id = model.where.get(name), box = scene.home.get(id); if (!box || box.kind !== "open") return;
  const at = box.layout.place[name], {width, height} = $("canvas").getBoundingClientRect(); if (!at) return;
  const x = box.x + PAD + box.layout.shift + at[0], y = box.y + BAR + PAD + at[1] + 30;
  if (view.k < .45) view.k = .8;
  const sx = x * view.k + view.x, sy = y * view.k + view.y;
  if (sx < 150 || sx > width - 150) view.x = width / 2 - x * view.k;
  if (sy < 90 || sy > height - 110) view.y = height / 2 - y * view.k;
}

// --- the panel on the right ---

function highlight(source) {
  return esc(source).replace(/(&quot;(?:[^&\n]|&(?!quot;))*&quot;|'[^'\n]*')|((?:#|\/\/|;)[^\n]*)|\b(def|for|in|if|else|elif|while|return|with|import|from|as|and|or|not|class|lambda|None|True|False)\b|\b(\d[\w.]*)\b|\b([A-Za-z_]\w*)(?=\()/g,
    (m, s, c, k, n, f) => s ? `<span class="s">${s}</span>` : c ? `<span class="c">${c}</span>` : k ? `<span class="k">${k}</span>` : n ? `<span class="n">${n}</span>` : `<span class="f">${f}</span>`);
}

const link = (name, note) => `<div class="row link" data-node="${esc(name)}"><code>&lrm;${esc(name)}</code><span title="${esc(note)}">${esc(cut(note.replace(/^kv<(\w+).*/, "kv $1"), 30))}</span></div>`;
const section = (name, body) => body ? `<h3>${name}</h3>${body}` : "";

function showDetails() {
  const n = model.nodes.get(state.node), panel = $("details");
  panel.scrollTop = 0;
  if (!n) { panel.innerHTML = passDetails(); return; }
  const status = model.status.get(n.name), history = [];
  DATA.stages.forEach((stage, i) => {
    const p = stage.programs[state.program]; if (!p || !i) return;
    const kind = ["added", "changed", "removed"].find(k => p[k].some(x => S[x] === n.name)), heir = Object.keys(p.heirs).some(x => S[x] === n.name);
    if (kind) history.push([i, heir && kind !== "removed" ? "fused" : kind]);
    const was = Object.entries(p.renamed).find(([now]) => S[now] === n.name); if (was) history.push([i, "renamed", S[was[1]]]);
  });
  const launches = (DATA.launches?.[state.program] ?? []).filter(l => l[0] === n.name), last = state.pass === DATA.stages.length - 1;
  const kernels = launches.map(([, key, grid, args]) => { const k = DATA.kernels[key], res = Object.entries(k.resources).map(([a, b]) => `${a} ${b}`).join(", ");
    return `<details${launches.length < 3 ? " open" : ""}><summary><code>${esc(key)}</code></summary><dl><dt>grid</dt><dd>${esc(grid)} tasks</dd><dt>checked by</dt><dd>${esc(k.checked_by)}</dd>${res ? `<dt>resources</dt><dd>${esc(res)}</dd>` : ""}<dt>arguments</dt><dd>${k.abi.map((a, i) => `${esc(a.split(":")[0])} = ${esc(args[i])}`).join("<br>")}</dd></dl><pre>${highlight(k.source)}</pre></details>`; }).join("");
  const inputs = n.inputs.filter(i => model.nodes.get(i)?.op !== "weight"), weights = weightsOf(n);
  panel.innerHTML = `<h2>%${esc(n.name)}</h2><div class="type">${esc(n.type)}</div><div style="margin-top:9px"><span class="chip">${esc(n.op)}</span>${status ? `<span class="chip ${status}">${status}</span>` : ""}${model.outputs.has(n.name) ? `<span class="chip">output ${esc(model.outputs.get(n.name))}</span>` : ""}</div>`
    + section("Origin in the model", n.origin && `<code>${esc(n.origin)}</code>`)
    + section("Attributes", n.attrs && `<code>${esc(n.attrs)}</code>`)
    + section("Takes the place of", (model.heirs.get(n.name) ?? []).map(v => `<span class="chip removed">${esc(inner(v))}</span>`).join(""))
    + section("Inputs", inputs.map(i => link(i, model.nodes.get(i)?.type ?? "")).join(""))
    + section("Weights", weights.map(i => link(i, model.nodes.get(i).type)).join(""))
    + section("Used by", (model.users.get(n.name) ?? []).slice(0, 12).map(u => link(u, model.nodes.get(u).op)).join("") + ((model.users.get(n.name) ?? []).length > 12 ? `<div class="dim">and ${model.users.get(n.name).length - 12} more</div>` : ""))
    + section("Through the passes", history.map(([i, kind, was]) => `<div class="row link" data-pass="${i}"><span class="chip ${kind}" style="margin:0">${kind}</span><code>&lrm;${esc(DATA.stages[i].title)}</code></div>${was ? `<div class="dim" style="overflow-wrap:anywhere"><code>was ${esc(was)}</code></div>` : ""}`).join(""))
    + section("Generated kernels", kernels || (DATA.kernels && last && n.op !== "weight" && n.op !== "input" ? '<span class="dim">none of its own: a view, or part of another launch</span>' : ""));
}

function passDetails() {
  const stage = DATA.stages[state.pass], p = model.program;
  if (!p) return "";
  const list = (kind, names) => names.length ? `<h3>${kind} ${names.length}</h3>` + names.slice(0, 40).map(v => model.nodes.has(v) ? link(v, model.nodes.get(v).op) : `<div class="row"><code>&lrm;${esc(v)}</code></div>`).join("") + (names.length > 40 ? `<div class="dim">and ${names.length - 40} more</div>` : "") : "";
  const fused = [...model.heirs.keys()], only = kind => (p[kind] ?? []).map(i => S[i]).filter(v => model.status.get(v) === kind);
  const m = DATA.model, facts = m && state.pass === DATA.stages.length - 1 ? section("The model", `<dl>${[["model", m.name], ["architecture", m.architecture], ["layers", m.num_layers], ["hidden", m.hidden_size], ["vocabulary", m.vocab_size.toLocaleString("en")], ["weights", `${m.weights_dtype}, ${bytes(DATA.levels[DATA.levels.length - 1].weight_bytes ?? 0)}`], ["target", DATA.target.name], ["kernels", Object.keys(DATA.kernels).length], ["launches", DATA.launches[state.program]?.length ?? "–"], ["source", m.source], ["sha256", DATA.sha256.slice(0, 16)]].map(([k, v]) => `<dt>${k}</dt><dd>${esc(v)}</dd>`).join("")}</dl>`) + section("Limits", `<dl>${Object.entries(DATA.limits).map(([k, v]) => `<dt>${esc(k)}</dt><dd>${v}</dd>`).join("")}</dl>`) : "";
  const outputs = section("Outputs", [...model.outputs].map(([v, r]) => link(v, r)).join("")), hint = '<p class="dim" style="margin-top:22px">Click a node for its type, origin and kernels; <kbd>?</kbd> lists the keys.</p>';
  return `<h2>${esc(stage.title)}</h2><div class="dim">${p.nodes.length} nodes${stage.options ? ` · <code>${esc(stage.options)}</code>` : ""}</div>`
    + section("Rules that fired", stage.rules.map(r => { const [, n, e] = /^(\d+) x (.*)$/.exec(r) ?? [0, "", r]; return `<div class="row"><span>${n} ×</span><code style="direction:ltr;white-space:normal">${esc(e)}</code></div>`; }).join(""))
    + (Object.keys(p.renamed).length ? `<p class="dim">${Object.keys(p.renamed).length} nodes got another name.</p>` : "") + list("Fused", fused) + list("Added", only("added")) + list("Changed", only("changed")) + list("Removed", p.removed.map(i => S[i]))
    + (state.pass && !p.added.length && !p.changed.length && !p.removed.length && !Object.keys(p.renamed).length ? '<p class="dim">This pass changed nothing here.</p>' : "") + outputs + facts + hint;
}

// --- passes ---

function counts(i) {
  const p = DATA.stages[i].programs[state.program]; if (!p || !i) return {added: 0, changed: 0, fused: 0, removed: 0};
  const heirs = new Set(Object.keys(p.heirs).map(Number));
  return {added: p.added.filter(x => !heirs.has(x)).length, changed: p.changed.filter(x => !heirs.has(x)).length, fused: heirs.size, removed: p.removed.length};
}

function showPasses() {
  const stage = DATA.stages[state.pass], c = counts(state.pass), many = DATA.stages.length > 1;
  document.querySelector(".passes").hidden = false; document.querySelector(".track").hidden = !many; $("prev").hidden = $("next").hidden = !many;
  $("pass-name").innerHTML = `<span class="dim">${many ? `${state.pass} of ${DATA.stages.length - 1}` : ""}</span><b>${esc(stage.title)}</b>`
    + [["added", "+"], ["changed", "~"], ["fused", "◆"], ["removed", "−"]].filter(([k]) => c[k]).map(([k, s]) => `<span class="count ${k}" title="${k}">${s}${c[k]}</span>`).join("")
    + `<code>${esc(stage.rules.length ? stage.rules[0].replace(/^(\d+) x /, "$1 × ") : stage.options)}</code>`;
  const half = 50 / DATA.stages.length; Object.assign($("slider").style, {marginLeft: `calc(${half}% - 8px)`, width: `calc(${100 - 2 * half}% + 16px)`});
  $("slider").max = DATA.stages.length - 1; $("slider").value = state.pass; $("slider").setAttribute("aria-valuetext", stage.title);
  const all = DATA.stages.map((_, i) => counts(i)), most = Math.max(1, ...all.map(x => x.added + x.changed + x.fused + x.removed));
  $("ticks").innerHTML = all.map((x, i) => {
    const total = x.added + x.changed + x.fused + x.removed, tall = total ? Math.max(5, 30 * Math.sqrt(total / most)) : 0;
    return `<div class="tick${i === state.pass ? " on" : ""}" data-pass="${i}" title="${esc(DATA.stages[i].title)}">${total ? `<div class="bar" style="height:${tall}px">${["added", "changed", "fused", "removed"].map(k => x[k] ? `<i class="${k}" style="flex:${x[k]}"></i>` : "").join("")}</div>` : '<div class="none"></div>'}</div>`; }).join("");
}

// --- the other tabs ---

const fact = (value, name) => `<div class="fact"><b>${value}</b><span>${name}</span></div>`;
const rate = x => `${(100 * x).toFixed(0)} %`;

function cascadeView() {
  const levels = DATA.levels, t = DATA.trace, plan = DATA.plan ?? {}, w = 300, gap = 190, total = levels.length * w + (levels.length - 1) * gap;
  let svg = `<svg viewBox="0 40 ${total} 246" style="max-width:${total + 60}px;margin:auto" role="img" aria-label="The cascade"><defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0l8 4-8 4z" fill="var(--accent)"/></marker><marker id="tip2" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0l8 4-8 4z" fill="var(--io)"/></marker></defs>`;
  levels.forEach((level, i) => {
    const x = i * (w + gap), last = i === levels.length - 1, m = t?.levels?.[level.name];
    const lines = [level.kv ? `${level.kv.format} cache, ${level.kv.bytes_per_token} B a token` : "no weights, no cache", level.weight_bytes ? `${bytes(level.weight_bytes)} of weights` : Object.entries(level.params).filter(([, v]) => typeof v === "number").slice(0, 2).map(([k, v]) => `${k.replace(/_/g, " ")} ${v}`).join(", ")];
    if (last && t) lines.push(`${t.verify_ms.toFixed(1)} ms a step of ${t.rows_per_step.toFixed(1)} rows`);
    if (!last && t) lines.push(`${(1000 * t.draft_ms).toFixed(0)} µs a draft`);
    svg += `<rect x="${x + 1}" y="60" width="${w - 2}" height="150" rx="16" fill="${last ? "color-mix(in srgb, var(--accent) 9%, var(--card))" : "var(--card)"}" stroke="${last ? "var(--accent)" : "var(--line)"}" stroke-width="1.5"/>`
      + `<text x="${x + 24}" y="96" style="font-size:19px;font-weight:640" fill="var(--text)">${esc(level.name)}</text><text x="${x + w - 24}" y="96" text-anchor="end" style="font-size:13px" fill="var(--dim)">${last ? "target" : `level ${i}`} · ${esc(level.kind)}</text>`
      + lines.map((l, k) => `<text x="${x + 24}" y="${128 + 24 * k}" style="font-size:13.5px" fill="var(--dim)">${esc(cut(l, 40))}</text>`).join("");
    if (last) return;
    const a = x + w + 8, b = x + w + gap - 8, mid = (a + b) / 2;
    svg += `<path d="M${a} 108H${b}" stroke="var(--accent)" stroke-width="2" fill="none" marker-end="url(#tip)"/><text x="${mid}" y="96" text-anchor="middle" style="font-size:13px" fill="var(--accent)">drafts ≤ ${plan.draft_tokens ?? "?"} nodes</text>`
      + `<path d="M${b} 160H${a}" stroke="var(--io)" stroke-width="2" fill="none" marker-end="url(#tip2)"/><text x="${mid}" y="182" text-anchor="middle" style="font-size:13px" fill="var(--io)">commits or rolls back</text>`
      + (m ? `<text x="${mid}" y="138" text-anchor="middle" style="font-size:15px;font-weight:640" fill="var(--text)">${rate(m.acceptance_rate)} accepted</text>` : `<text x="${mid}" y="138" text-anchor="middle" style="font-size:12.5px" fill="var(--faint)">not measured</text>`);
  });
  const x = (levels.length - 1) * (w + gap) + w / 2;
  svg += `<path d="M${x} 214V252" stroke="var(--io)" stroke-width="2" marker-end="url(#tip2)"/><text x="${x}" y="276" text-anchor="middle" style="font-size:14px" fill="var(--text)">${t ? `${t.acceptance_length.toFixed(2)} tokens a step` : "the target's own tokens"}</text></svg>`;
  const depths = t ? Object.entries(t.levels).map(([name, l]) => `<h3>${esc(name)}: accepted by depth</h3><table>${l.depths.map((d, i) => `<tr><td style="width:90px">depth ${i + 1}</td><td class="num" style="width:70px">${rate(d.rate)}</td><td><div class="meter"><i style="width:${100 * d.rate}%"></i></div></td><td class="dim" style="width:170px">${d.accepted} of ${d.offered} steps</td></tr>`).join("")}</table>`).join("") : "";
  $("cascade").innerHTML = `<h1>The cascade</h1><p>Levels from the cheapest guesser to the target. A guess is committed only where it equals the target's own choice, so the text is the target's whatever the levels propose.</p>`
    + (t ? `<div class="facts">${fact(t.tokens, "tokens in the trace")}${fact(t.steps, "steps of the target")}${fact(t.acceptance_length.toFixed(2), "tokens a step (acceptance length)")}${fact(rate(t.acceptance_rate), `of ${t.drafted} drafted nodes accepted`)}${fact(`${(1000 * t.tokens / t.total_ms).toFixed(1)}`, "tokens a second, traced")}</div>` : "")
    + `<div class="panel">${svg}</div>` + (depths ? `<div class="panel">${depths}</div>` : `<div class="panel dim">Acceptance and cost are measured on your prompts: <code>mlsdc trace ARTIFACT --prompt "…" -o trace.json</code>, then <code>mlsdc view ARTIFACT trace.json</code>.</div>`);
}

function kvView() {
  const levels = DATA.levels.filter(l => l.kv);
  $("kv").innerHTML = `<h1>KV cache</h1><p>One byte pool, cut into each level's pages. A page holds some tokens of all layers at fixed offsets, so the bytes of a key depend on its position and the tokens only.</p>` + levels.map(kvLevel).join("") + (levels.length ? "" : '<div class="panel dim">No level has a cache at this stage.</div>');
}

function kvLevel(level) {
  const kv = level.kv, L = kv.num_layers, H = kv.num_kv_heads, pool = level.params.kv_pool_bytes, limits = DATA.limits;
  const cw = Math.min(150, 420 / H), ch = Math.max(7, Math.min(16, 400 / L)), top = 40, left = 70, gh = L * ch;
  let page = `<svg viewBox="0 0 1120 ${Math.max(gh + 80, 400)}" role="img" aria-label="One page of the cache"><text x="${left}" y="22" style="font-size:14px;font-weight:640" fill="var(--text)">one page: ${kv.page_size} tokens, ${bytes(kv.page_bytes)}</text>`;
  for (let l = 0; l < L; l++) for (let h = 0; h < H; h++) { const x = left + h * cw, y = top + l * ch, on = l === 0 && h === 0;
    page += `<rect x="${x}" y="${y}" width="${cw / 2 - 1}" height="${ch - 1.5}" rx="1.5" fill="var(--attention)" opacity="${on ? 1 : .45}"/><rect x="${x + cw / 2}" y="${y}" width="${cw / 2 - 4}" height="${ch - 1.5}" rx="1.5" fill="var(--kv)" opacity="${on ? 1 : .45}"/>`; }
  for (let l = 0; l < L; l += Math.max(1, Math.ceil(L / 8))) page += `<text x="${left - 8}" y="${top + l * ch + ch - 2}" text-anchor="end" style="font-size:10.5px" fill="var(--dim)">layer ${l}</text>`;
  for (let h = 0; h < H; h++) page += `<text x="${left + h * cw + cw / 2}" y="${top + gh + 18}" text-anchor="middle" style="font-size:11px" fill="var(--dim)">kv head ${h}</text>`;
  const zx = left + H * cw + 90, zw = 1120 - zx - 10, half = 130;
  page += `<path d="M${left + cw - 3} ${top + ch / 2}C${zx - 60} ${top + ch / 2} ${zx - 50} ${top + 60} ${zx - 8} ${top + 60}" stroke="var(--dim)" stroke-dasharray="4 4" fill="none"/><text x="${zx}" y="22" style="font-size:14px;font-weight:640" fill="var(--text)">one head of one layer: ${bytes(kv.k_block_bytes + kv.v_block_bytes)}</text>`;
  for (const [i, [name, color, size, text]] of [["keys", "attention", kv.k_block_bytes, "16 tokens side by side: a vector lane is a token"], ["values", "kv", kv.v_block_bytes, "a token after the other: a vector lane is a channel"]].entries()) {
    const y = top + i * (half + 54), cols = i ? 16 : kv.page_size / 16, rows = i ? kv.page_size / 4 : 8;
    page += `<rect x="${zx}" y="${y}" width="${zw}" height="${half}" rx="9" fill="var(--${color})" opacity=".12"/>`;
    if (i === 0) for (let c = 0; c < cols; c++) for (let t = 0; t < 16; t++) { const bw = (zw - 20) / cols; page += `<rect x="${zx + 10 + c * bw + t * (bw - 10) / 16}" y="${y + 12}" width="${(bw - 10) / 16 - 2}" height="${half - 24}" rx="2" fill="var(--${color})" opacity="${.45 + .3 * (t % 2)}"/>`; }
    else for (let r = 0; r < rows; r++) page += `<rect x="${zx + 10}" y="${y + 12 + r * (half - 24) / rows}" width="${zw - 20}" height="${(half - 24) / rows - 2}" rx="2" fill="var(--${color})" opacity="${.45 + .3 * (r % 2)}"/>`;
    page += `<text x="${zx}" y="${y + half + 18}" style="font-size:12px" fill="var(--dim)">${name}  ${esc(kv.format)}, ${bytes(size)}; ${kv.format === "bf16" ? text : `${kv.bits} bits an element`}</text>`;
  }
  page += "</svg>";
  let grid = "", facts = fact(kv.bytes_per_token.toLocaleString("en"), "bytes a token, all layers") + fact(kv.page_size, "tokens a page") + fact(bytes(kv.page_bytes), "a page");
  if (pool && limits) {
    const pages = Math.floor(pool / kv.page_bytes), each = Math.ceil(limits.max_model_len / kv.page_size), scratch = Math.ceil((limits.max_tree_nodes + 1) / kv.page_size);
    facts += fact(pages, `pages in ${bytes(pool)}`) + fact(Math.floor(pages / (each + scratch)), `contexts of ${limits.max_model_len} tokens at once`);
    const shown = Math.min(pages, 2000), cols = 60, sq = 18; let cells = "";
    for (let i = 0; i < shown; i++) { const kind = i < each ? "attention" : i < each + scratch ? "fused" : ""; cells += `<rect x="${(i % cols) * sq}" y="${Math.floor(i / cols) * sq}" width="${sq - 3}" height="${sq - 3}" rx="3.5" fill="${kind ? `var(--${kind})` : "var(--soft)"}" opacity="${kind ? .8 : 1}"/>`; }
    grid = `<div class="panel"><h3 style="margin-top:0">The pool: ${pages} pages</h3><svg viewBox="0 0 ${cols * sq} ${Math.ceil(shown / cols) * sq}">${cells}</svg><p class="dim" style="margin-bottom:0"><i class="meter" style="display:inline-block;width:10px;min-width:0;height:10px;background:var(--attention)"></i> one sequence of ${limits.max_model_len} tokens: ${each} pages &nbsp; <i class="meter" style="display:inline-block;width:10px;min-width:0;height:10px;background:var(--fused)"></i> its scratch slab for drafted tokens: ${scratch} page${scratch > 1 ? "s" : ""} &nbsp; the rest is free, or caches prefixes${shown < pages ? `; the first ${shown} are drawn` : ""}</p></div>`;
  }
  return `<h3>${esc(level.name)}</h3><div class="facts">${facts}</div><div class="panel">${page}</div>${grid}`;
}

function kernelsView() {
  const uses = {}, times = DATA.trace?.kernels ?? {}, total = Object.values(times).reduce((a, b) => a + b, 0);
  for (const list of Object.values(DATA.launches)) for (const [, key] of list) uses[key] = (uses[key] ?? 0) + 1;
  const keys = Object.keys(DATA.kernels).sort((a, b) => (times[b] ?? 0) - (times[a] ?? 0) || (uses[b] ?? 0) - (uses[a] ?? 0));
  $("kernels").innerHTML = `<h1>Kernels</h1><p>${keys.length} kernels for ${esc(DATA.target.name)} (${esc(DATA.target.requires.join(" "))}), generated from templates. ${total ? "Times are of the trace's steps, one launch at a time." : "Their order is how often they are launched."}</p><div class="panel"><table><tr><th>kernel</th><th style="text-align:right">launches a step</th><th>checked by</th>${total ? "<th style='text-align:right'>ms in the trace</th><th style='width:180px'>share</th>" : ""}</tr>`
    + keys.map(key => `<tr><td><details><summary><code>${esc(key)}</code></summary><div class="dim" style="margin:4px 0">${esc(DATA.kernels[key].file)} &nbsp; <code>${esc(DATA.kernels[key].abi.join(", "))}</code></div><pre>${highlight(DATA.kernels[key].source)}</pre></details></td><td class="num">${uses[key] ?? 0}</td><td class="dim">${esc(DATA.kernels[key].checked_by)}</td>${total ? `<td class="num">${((times[key] ?? 0) / 1000).toFixed(1)}</td><td><div class="meter"><i style="width:${100 * (times[key] ?? 0) / total}%"></i></div></td>` : ""}</tr>`).join("") + "</table></div>";
}

function pipelineView() {
  const explained = new Map((DATA.explain ?? []).map(e => [e.pass, e]));
  const rows = DATA.stages.length > 1 ? DATA.stages.map((s, i) => [i, s.title, s.options, s.rules]) : (DATA.explain ?? []).map((e, i) => [-1, e.pass, Object.entries(e.options).map(([k, v]) => `${k}=${v}`).join(", "), Object.entries(e.fired).map(([r, at]) => `${at.length} x ${r}`)]);
  $("pipeline").innerHTML = `<h1>Passes</h1><p>Every pass in order: what it did to the graph, which rules fired, and which were tried and declined.</p><div class="panel"><table><tr><th></th><th>pass</th><th>changes</th><th>rules</th></tr>` + rows.map(([i, name, options, rules], k) => {
    const c = i >= 0 ? counts(i) : {}, e = explained.get(name), declined = Object.entries(e?.declined ?? {}).filter(([, n]) => n);
    return `<tr><td class="num dim">${k}</td><td><a href="#" data-pass="${i}" style="color:inherit;font-weight:600;text-decoration:none">${esc(name)}</a>${options ? `<div class="dim" style="max-width:260px;overflow-wrap:anywhere">${esc(options)}</div>` : ""}</td><td style="white-space:nowrap">${[["added", "+"], ["changed", "~"], ["fused", "◆"], ["removed", "−"]].filter(([x]) => c[x]).map(([x, s]) => `<span class="count ${x}">${s}${c[x]}</span> `).join("") || (e && Object.keys(e.graphs).length && i < 0 ? Object.values(e.graphs).map(g => `${g.before} → ${g.after}`).join(", ") : '<span class="dim">nothing</span>')}</td><td>${rules.map(r => `<div><code>${esc(r.replace(/^(\d+) x /, "$1 × "))}</code></div>`).join("")}${declined.map(([r, n]) => `<div class="dim">declined ${n} times: <code>${esc(r)}</code></div>`).join("")}</td></tr>`; }).join("") + "</table></div>";
}

const DRAWN = {cascade: cascadeView, kv: kvView, kernels: kernelsView, pipeline: pipelineView}, done = new Set();

// --- what happens ---

function matches(n) { const q = state.query.toLowerCase(); return n.name.toLowerCase().includes(q) || n.op.includes(q) || n.type.toLowerCase().includes(q) || n.origin.toLowerCase().includes(q); }

function setTab(tab) {
  state.tab = tab;
  for (const [id] of TABS) $(id).hidden = id !== tab;
  for (const b of $("tabs").children) b.setAttribute("aria-selected", b.dataset.tab === tab);
  if (DRAWN[tab] && !done.has(tab)) { done.add(tab); DRAWN[tab](); }
  if (tab === "graph") { if (!view.x) fit(); redraw(); }
  remember();
}

function setPass(pass, keep = true) {
  state.pass = Math.max(0, Math.min(DATA.stages.length - 1, pass));
  loadModel(); defaultOpen(); buildScene(); showPasses(); showDetails();
  if (!keep) fit();
  redraw(); remember();
}

function defaultOpen() { // the first layer is open until the reader says otherwise
  if (state.touched) return;
  const first = model.groups.find(g => g.id.startsWith("layer"));
  state.open = new Set(model.groups.filter(g => !g.id.startsWith("layer") || g === first).map(g => g.id));
}

function toggle(id) {
  state.touched = true;
  if (id === "run") state.unrolled = true;
  else if (state.open.has(id)) state.open.delete(id); else state.open.add(id);
  buildScene(); redraw();
}

function foldAll() {
  const layers = model.groups.filter(g => g.id.startsWith("layer")), all = layers.every(g => state.open.has(g.id));
  state.touched = true; state.unrolled = false;
  for (const g of model.groups) if (all && g.id.startsWith("layer")) state.open.delete(g.id); else state.open.add(g.id);
  buildScene(); fit(); redraw();
}

function select(name, go = true) {
  state.node = name;
  const id = model.where.get(name) ?? model.where.get((model.users.get(name) ?? [])[0]);
  if (name && go && id && !state.open.has(id)) { state.touched = true; state.open.add(id); buildScene(); }
  if (name && go) centre(model.where.has(name) ? name : model.users.get(name)[0]);
  showDetails(); redraw(); remember();
}

function find(query) {
  state.query = query;
  const list = $("results"), hits = query ? [...model.nodes.values()].filter(matches) : [];
  list.hidden = !query; list.innerHTML = hits.slice(0, 60).map((n, i) => `<li data-node="${esc(n.name)}" class="${i ? "" : "on"}"><code>${esc(n.name)}</code><span>${esc(n.op)} ${esc(shapeText(n.type))}</span></li>`).join("") || '<li class="dim">nothing found at this pass</li>';
  if (hits.length > 60) list.innerHTML += `<li class="dim">and ${hits.length - 60} more</li>`;
  redraw();
}

function setTheme(theme) { state.theme = theme; document.documentElement.dataset.theme = theme; }
function remember() { const p = new URLSearchParams(); if (state.tab !== "graph") p.set("tab", state.tab); p.set("pass", state.pass); if (state.node) p.set("node", state.node); if (Object.keys(programs()).length > 1) p.set("program", state.program); try { history.replaceState(null, "", "#" + p); } catch { /* a file opened where that is not allowed */ } }
function programs() { const all = {}; for (const s of DATA.stages) Object.assign(all, s.programs); return all; }

function move(step) { // along the data flow
  const n = model.nodes.get(state.node);
  if (!n) { const first = model.groups.flatMap(g => g.nodes)[0]; if (first) select(first.name); return; }
  const near = step > 0 ? model.users.get(n.name) : n.inputs.filter(i => model.nodes.get(i)?.op !== "weight");
  if (near?.length) select(near[step > 0 ? 0 : near.length - 1]);
}

function start() {
  const p = new URLSearchParams(location.hash.slice(1)), all = Object.keys(programs());
  state.program = all.includes(p.get("program")) ? p.get("program") : all.find(x => x.startsWith("target/")) ?? all[0] ?? "";
  setTheme(p.get("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  $("title").textContent = DATA.title;
  $("tabs").innerHTML = TABS.map(([id, name]) => `<button role="tab" data-tab="${id}">${name}</button>`).join("");
  $("program").innerHTML = all.map(x => `<option${x === state.program ? " selected" : ""}>${esc(x)}</option>`).join(""); $("program").hidden = all.length < 2;
  $("legend").innerHTML = DATA.stages.length > 1 ? ["added", "changed", "fused", "removed"].map(k => `<span><i style="background:var(--${k})"></i>${k}</span>`).join("") : [["attention", "attention"], ["linear", "linear"], ["norm", "norm"], ["kv", "cache"], ["quant", "quantise"], ["shape", "shape"], ["io", "in and out"]].map(([k, n]) => `<span><i style="background:var(--${k})"></i>${n}</span>`).join("");
  $("keys").innerHTML = `<h2>Keyboard</h2><table>${[["←  →", "previous and next pass"], ["↑  ↓", "along the data flow, from the selected node"], ["/", "search"], ["Enter", "go to the first result"], ["+  −  0", "zoom in, out, fit"], ["e", "expand or collapse all layers"], ["1 … 5", "the tabs"], ["t", "light or dark"], ["Esc", "close, deselect"]].map(([k, w]) => `<tr><td><kbd>${k}</kbd></td><td>${w}</td></tr>`).join("")}</table>`;
  if (p.get("open") === "all") state.touched = true;
  setPass(p.has("pass") ? +p.get("pass") : DATA.stages.length - 1, false);
  if (p.get("open") === "all") foldAll();
  fit();
  if (p.get("node") && model.nodes.has(p.get("node"))) select(p.get("node"));
  setTab(TABS.some(([id]) => id === p.get("tab")) ? p.get("tab") : "graph");
  draw();
}

document.addEventListener("click", event => {
  const at = event.target.closest?.("[data-node], [data-toggle], [data-pass], [data-tab]");
  if (!event.target.closest?.(".search")) $("results").hidden = true;
  if (!at || moved > 4) return;
  const {node, toggle: box, pass, tab} = at.dataset;
  if (node) { if (model.nodes.has(node)) { setTab("graph"); select(node, !at.classList.contains("card")); $("results").hidden = true; } }
  else if (box) toggle(box);
  else if (pass && +pass >= 0) { event.preventDefault(); setTab("graph"); setPass(+pass); }
  else if (tab) setTab(tab);
});
$("slider").addEventListener("input", event => setPass(+event.target.value));
$("prev").onclick = () => setPass(state.pass - 1); $("next").onclick = () => setPass(state.pass + 1);
$("program").onchange = event => { state.program = event.target.value; state.node = ""; state.touched = false; setPass(state.pass, false); };
$("theme").onclick = () => setTheme(state.theme === "dark" ? "light" : "dark"); $("help").onclick = () => $("keys").showModal();
$("fold").onclick = foldAll; $("zoom-in").onclick = () => zoom(1.3); $("zoom-out").onclick = () => zoom(1 / 1.3); $("zoom-fit").onclick = () => { fit(); redraw(); };
$("search").addEventListener("input", event => find(event.target.value.trim()));
$("search").addEventListener("keydown", event => {
  const items = [...$("results").querySelectorAll("[data-node]")], on = items.findIndex(i => i.classList.contains("on"));
  if (event.key === "Enter" && items.length) { select(items[Math.max(0, on)].dataset.node); $("results").hidden = true; $("search").blur(); }
  else if (event.key.startsWith("Arrow") && items.length) { event.preventDefault(); items[on]?.classList.remove("on"); const to = items[(on + (event.key === "ArrowDown" ? 1 : items.length - 1)) % items.length]; to.classList.add("on"); to.scrollIntoView({block: "nearest"}); }
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape") { if ($("keys").open) return; $("search").value = ""; find(""); $("search").blur(); if (state.node) select("", false); return; }
  if (/INPUT|SELECT|TEXTAREA/.test(event.target.tagName) && event.target.type !== "range" || event.ctrlKey || event.metaKey || event.altKey) return;
  const key = event.key, tab = TABS[+key - 1];
  const action = tab ? () => setTab(tab[0]) : {"/": () => $("search").focus(), t: () => $("theme").click(), "?": () => $("keys").showModal(), ...(state.tab === "graph" ? {e: foldAll, "+": () => zoom(1.3), "=": () => zoom(1.3), "-": () => zoom(1 / 1.3), 0: () => { fit(); redraw(); }, ArrowLeft: () => setPass(state.pass - 1), ArrowRight: () => setPass(state.pass + 1), ArrowUp: () => move(-1), ArrowDown: () => move(1)} : {})}[key];
  if (action) { event.preventDefault(); action(); }
});
let drag = null, moved = 0;
$("canvas").addEventListener("pointerdown", event => { drag = [event.clientX, event.clientY]; moved = 0; });
addEventListener("pointermove", event => {
  if (!drag) return;
  const dx = event.clientX - drag[0], dy = event.clientY - drag[1];
  moved += Math.abs(dx) + Math.abs(dy); view.x += dx; view.y += dy; drag = [event.clientX, event.clientY]; $("canvas").classList.add("drag"); redraw();
});
addEventListener("pointerup", () => { drag = null; $("canvas").classList.remove("drag"); setTimeout(() => { moved = 0; }); });
$("canvas").addEventListener("wheel", event => {
  event.preventDefault();
  if (event.ctrlKey || event.metaKey) { const r = $("canvas").getBoundingClientRect(); zoom(Math.exp(-event.deltaY / 240), event.clientX - r.left, event.clientY - r.top); }
  else { view.x -= event.shiftKey ? event.deltaY : event.deltaX; view.y -= event.shiftKey ? 0 : event.deltaY; redraw(); }
}, {passive: false});
addEventListener("resize", redraw);
start();
