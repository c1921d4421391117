"use strict";
// Layout: nodes of one layer in ranks (longest path), long edges through dummies, order by barycentre. Layers that look alike share a layout.

const CARD = 218, GAP_X = 26, GAP_Y = 46, PORT_H = 22;

function layeredLayout(nodes, heights) {
  // nodes: [{id, inputs: [id within the group], pin: "top", "bottom" or none}] in topological order -> {place: {id: [x, y]}, edges: [{from, to, points}], width, height}
  const rank = {}, users = {};
  for (const n of nodes) users[n.id] = [];
  for (const n of nodes) {
    rank[n.id] = Math.max(-1, ...n.inputs.map(i => rank[i])) + 1;
    for (const i of n.inputs) users[i].push(n.id);
  }
  for (const n of [...nodes].reverse()) // ports and constants sit right above whoever needs them
    if (!n.pin && !n.inputs.length && users[n.id].length) rank[n.id] = Math.max(0, Math.min(...users[n.id].map(u => rank[u])) - 1);
  const deepest = Math.max(0, ...nodes.filter(n => n.pin !== "bottom").map(n => rank[n.id])) + 1;
  for (const n of nodes) if (n.pin === "bottom") rank[n.id] = deepest;
  const ranks = [], items = {};
  const put = (id, r, dummy) => { items[id] = {id, r, dummy, w: dummy ? 12 : CARD, up: [], down: []}; (ranks[r] ??= []).push(items[id]); };
  for (const n of nodes) put(n.id, rank[n.id], false);
  const edges = [];
  for (const n of nodes) for (const from of [...new Set(n.inputs)]) {
    const path = [from];
    for (let r = rank[from] + 1; r < rank[n.id]; r++) { const id = `${from}>${n.id}:${r}`; put(id, r, true); path.push(id); }
    path.push(n.id);
    for (let i = 1; i < path.length; i++) { items[path[i - 1]].down.push(items[path[i]]); items[path[i]].up.push(items[path[i - 1]]); }
    edges.push({from, to: n.id, path});
  }
  for (let r = 0; r < ranks.length; r++) ranks[r] ??= [];
  const number = row => row.forEach((item, i) => { item.o = i; });
  ranks.forEach(number);
  const mean = (list, key, item) => list.length ? list.reduce((sum, x) => sum + x[key], 0) / list.length : item[key];
  for (let sweep = 0; sweep < 6; sweep++) {
    const down = sweep % 2 === 0;
    for (const row of down ? ranks : [...ranks].reverse()) {
      for (const item of row) item.b = mean(down ? item.up : item.down, "o", item);
      row.sort((a, b) => a.b - b.b || a.o - b.o); number(row);
    }
  }
  for (const row of ranks) { let x = 0; for (const item of row) { item.x = x + item.w / 2; x += item.w + GAP_X; } for (const item of row) item.x -= (x - GAP_X) / 2; }
  for (let sweep = 0; sweep < 12; sweep++) {
    const down = sweep % 2 === 0;
    for (const row of down ? ranks : [...ranks].reverse()) {
      for (const item of row) { const near = down ? item.up : item.down; item.want = mean(near.length ? near : item.down, "x", item); }
      spread(row);
    }
  }
  let y = 0; const top = [], bottom = [];
  ranks.forEach((row, r) => { const tall = Math.max(0, ...row.filter(i => !i.dummy).map(i => heights[i.id])); top[r] = y; bottom[r] = y + tall; y += tall + GAP_Y; });
  const all = Object.values(items), left = Math.min(...all.map(i => i.x - i.w / 2)), right = Math.max(...all.map(i => i.x + i.w / 2));
  const place = {};
  for (const n of nodes) place[n.id] = [items[n.id].x - left, top[rank[n.id]]];
  for (const edge of edges) edge.points = edge.path.map((id, k) => { const i = items[id]; return [i.x - left, k === 0 ? top[i.r] + heights[id] : k === edge.path.length - 1 ? top[i.r] : (top[i.r] + bottom[i.r]) / 2]; });
  return {place, edges, width: right - left, height: Math.max(0, y - GAP_Y)};
}

function spread(row) { // nearest places to `want` that keep order and distance: pool neighbours that collide, give each pool its mean
  const pools = [];
  for (const item of row) {
    let pool = {items: [item], at: item.want - item.w / 2, width: item.w};
    while (pools.length && pools[pools.length - 1].at + pools[pools.length - 1].width + GAP_X > pool.at) {
      const last = pools.pop(), n = last.items.length, m = pool.items.length;
      const at = (last.at * n + (pool.at - last.width - GAP_X) * m) / (n + m);
      pool = {items: [...last.items, ...pool.items], at, width: last.width + GAP_X + pool.width};
    }
    pools.push(pool);
  }
  for (const pool of pools) { let x = pool.at; for (const item of pool.items) { item.x = x + item.w / 2; x += item.w + GAP_X; } }
}

function curve(points) {
  let d = `M${points[0][0]} ${points[0][1]}`;
  for (let i = 1; i < points.length; i++) { const [x0, y0] = points[i - 1], [x1, y1] = points[i], m = (y0 + y1) / 2; d += `C${x0} ${m} ${x1} ${m} ${x1} ${y1}`; }
  return d;
}
