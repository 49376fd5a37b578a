"use strict";
const fxqThemes = [...document.querySelectorAll(".fxq .theme")], fxqDark = matchMedia("(prefers-color-scheme: dark)");
const fxqTheme = box => box.closest(".fxq").dataset.theme || (fxqDark.matches ? "dark" : "light");
const fxqNames = () => fxqThemes.forEach(box => { box.textContent = fxqTheme(box) === "dark" ? "Light theme" : "Dark theme"; });
for (const box of fxqThemes) {
  box.hidden = false;
  box.onclick = () => { box.closest(".fxq").dataset.theme = fxqTheme(box) === "dark" ? "light" : "dark"; fxqNames(); };
}
fxqDark.addEventListener("change", fxqNames);
fxqNames();
const FXQ = {
  si(x) {
    if (!x) return "0 ";
    const power = Math.min(Math.floor(Math.log10(x) / 3), 5);
    return (x / 1000 ** power).toPrecision(3).replace(/\.?0+$/, "") + " " + ["", "k", "M", "G", "T", "P"][power];
  },
  bytes(x) {
    const power = x ? Math.min(4, Math.floor(Math.log2(x) / 10)) : 0, n = x / 1024 ** power;
    return (n >= 100 ? Math.round(n) : +n.toPrecision(3)) + " " + ["B", "KiB", "MiB", "GiB", "TiB"][power];
  },
  us(x) { return x < 999.5 ? +x.toPrecision(3) + " µs" : +(x / 1000).toPrecision(3) + " ms"; },
  percent(x) { return x >= 0.995 || x === 0 ? Math.round(100 * x) + "%" : x < 0.001 ? "<0.1%" : (100 * x).toFixed(1) + "%"; },
};
for (const root of document.querySelectorAll(".fxq .report")) fxqTree(root);

function fxqTree(root) {
  const source = root.querySelector("script.data");
  if (!source) return;
  const data = JSON.parse(source.textContent), drawn = root.querySelector("script.pictures");
  const pictures = drawn ? JSON.parse(drawn.textContent) : {};
  const at = name => root.querySelector(name);
  const input = at("input"), kind = at(".kind"), sort = at(".sort"), output = at(".tools output"), body = at(".tree > tbody");
  const heads = [...root.querySelectorAll(".tree > thead th[data-key]")];
  const nodes = [], leaves = [], opened = new Set();
  const MORE = 40;
  let words = [], descending = true, most = MORE, chosen = null, visible = [];

  const add = (node, parent, level) => {
    Object.assign(node, {parent, level, open: false, index: nodes.length});
    nodes.push(node);
    const sums = {flops: 0, quantized: 0, was: 0, now: 0, before: 0, after: 0, error: 0};
    if (!node.nodes) {
      leaves.push(node);
      Object.assign(sums, {flops: node.flops * node.count, quantized: node.done * node.count, error: node.error || 0});
      if (node.us) { sums.was = node.us[0] * node.count; sums.now = node.us[1] * node.count; }
      if (node.weight) { sums.before = node.weight[0] * node.count; sums.after = node.weight[1] * node.count; }
      node.unfused = data.unfused[node.layer] || [];
      node.parts = node.path.toLowerCase().split(/[ .]+(?![^{]*})/);
      node.text = facts(node).join(" ").toLowerCase();
      node.tokens = new Set(node.text.split(/[\s,;:()\[\]×]+/));
      node.slower = node.reference || (node.us && node.us[1] > node.us[0]);
    } else {
      for (const inner of node.nodes) {
        const of = add(inner, node, level + 1);
        for (const key in sums) sums[key] = key === "error" ? Math.max(sums.error, of.error) : sums[key] + of[key];
      }
    }
    node.sums = sums;
    return sums;
  };
  const facts = leaf => [leaf.form, leaf.size,
    ...leaf.gemms.flatMap(([part, gemm, operands]) =>
      [part, gemm, ...operands.flatMap(o => [o[0], o[1], o[2], o[3], o[7]])]),
    ...leaf.work.flatMap(w => [w[0], w[1]]), ...leaf.reasons, ...leaf.unfused.flat()];
  const total = {flops: 0, was: 0, now: 0};
  for (const node of data.nodes) {
    const of = add(node, null, 0);
    for (const key in total) total[key] += of[key];
  }
  openFirst();

  function openFirst() {
    let level = data.nodes, count = level.length;
    while (level.length) {
      const inner = level.flatMap(node => node.nodes || []);
      count += inner.length;
      if (count > 60) break;
      for (const node of level) if (node.nodes) node.open = true;
      level = inner;
    }
  }
  const isNumber = word => /^\d+$/.test(word);
  const inRange = (part, number) => part[0] === "{" && part.slice(1, -1).split(",").some(run => {
    const [low, high] = run.split("..").map(Number);
    return number >= low && number <= (high ?? low);
  });
  const samePart = (part, word, whole) => word === "*" || part === word || (isNumber(word) && inRange(part, +word))
    || (!whole && !isNumber(word) && part.startsWith(word));
  const inPath = (leaf, word) => {
    const wanted = word.split(".").filter(Boolean);
    if (!wanted.length) return true;
    if (wanted.length === 1 && !isNumber(wanted[0])) return leaf.parts.some(part => part.includes(wanted[0]));
    return leaf.parts.some((_, start) => wanted.every((w, i) => start + i < leaf.parts.length
      && samePart(leaf.parts[start + i], w, i < wanted.length - 1 || word.endsWith("."))));
  };
  const inFacts = (leaf, word) => leaf.tokens.has(word) || (!isNumber(word) && leaf.text.includes(word));
  const ofKind = {
    "": () => true,
    unquantized: leaf => leaf.done < leaf.flops || leaf.reasons.length > 0,
    quantized: leaf => leaf.reasons.length === 0,
    slower: leaf => leaf.slower,
    measured: leaf => leaf.errors.length > 0,
  };
  const matches = leaf => ofKind[kind.value](leaf) && words.every(word => inPath(leaf, word) || inFacts(leaf, word));
  const keys = {
    model: leaf => leaf.index, flops: leaf => leaf.sums.flops, bytes: leaf => leaf.sums.before,
    time: leaf => leaf.sums.now, saved: leaf => leaf.sums.was - leaf.sums.now, error: leaf => leaf.sums.error,
    name: leaf => leaf.path,
  };

  function rows() {
    const filtered = words.length > 0 || kind.value !== "", key = sort.value;
    const found = leaves.filter(matches);
    output.textContent = found.length === leaves.length ? `${leaves.length} rows for ${data.all} matmuls`
      : `${found.length} of ${leaves.length} rows`;
    if (key !== "model") {
      const of = keys[key], sign = (key === "name") === descending ? 1 : -1;
      return found.sort((a, b) => sign * (of(a) < of(b) ? -1 : of(a) > of(b) ? 1 : 0) || a.index - b.index);
    }
    const shown = new Set(found);
    if (filtered) for (const leaf of found) for (let n = leaf.parent; n && !shown.has(n); n = n.parent) shown.add(n);
    const list = [];
    const walk = node => {
      if (filtered ? !shown.has(node) : false) return;
      list.push(node);
      if (node.nodes && (node.open || filtered)) node.nodes.forEach(walk);
    };
    data.nodes.forEach(walk);
    return list;
  }

  const make = (tag, name, text) => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const cell = (name, label) => {
    const td = make("td", name);
    td.setAttribute("role", "gridcell");
    if (label) td.dataset.label = label;
    return td;
  };
  const share = (value, all, name) => {
    const bar = make("div", "share " + name);
    bar.style.width = all ? Math.max(1, 100 * value / all) + "%" : 0;
    return bar;
  };
  const chip = (family, text) => make("span", "chip " + family, text);
  const short = operand => operand[4] === "skipped" ? operand[3].toLowerCase().replaceAll("_", " ") : operand[3].split(/[( ]/)[0];

  function formats(leaf, td) {
    const strip = make("span", "strip"), names = new Map();
    const said = leaf.gemms.map(([part, gemm, operands]) => {
      const pair = make("span");
      for (const o of operands) { pair.append(make("i", o[4])); names.set(short(o), o[4]); }
      strip.append(pair);
      return `${part} ${gemm}: ${operands.map(o => o[0] + " " + short(o)).join(", ")}`;
    });
    strip.setAttribute("role", "img");
    strip.setAttribute("aria-label", said.join("; "));
    td.append(strip);
    for (const [name, family] of [...names].slice(0, 3)) td.append(chip(family, name), " ");
    if (names.size > 3) td.append(make("span", "soft", "+" + (names.size - 3)));
  }

  const kept = new Map();
  function row(node, flat) {
    const key = 2 * node.index + flat, tr = kept.get(key) || newRow(node, flat);
    kept.set(key, tr);
    const open = String(node.nodes ? node.open || words.length > 0 || kind.value !== "" : opened.has(node));
    tr.tabIndex = node === chosen ? 0 : -1;
    if (tr.getAttribute("aria-expanded") !== open) {
      tr.setAttribute("aria-expanded", open);
      tr.querySelector(".twist").textContent = open === "true" ? "▾" : "▸";
    }
    return tr;
  }

  function newRow(node, flat) {
    const leaf = !node.nodes, tr = make("tr", "row " + (leaf ? "leaf" : "module")), s = node.sums;
    tr.dataset.index = node.index;
    tr.setAttribute("role", "row");
    tr.setAttribute("aria-level", flat ? 1 : node.level + 1);
    const first = cell("first");
    first.style.setProperty("--level", flat ? 0 : node.level);
    first.append(make("span", "twist"));
    first.append(make("span", "name", flat ? node.path : node.name));
    const many = flat ? node.count : node.times;
    if (many > 1) first.append(make("span", "times", "×" + many));
    const link = make("a", "anchor", "#");
    link.href = "#" + data.prefix + encodeURIComponent(node.path);
    link.title = "link to this row";
    link.setAttribute("aria-label", "link to " + node.path);
    link.tabIndex = -1;
    first.append(link);
    const fmt = cell("fmt"), size = cell("num size"), flops = cell("num", "FLOP"), bytes = cell("num", "weight"), time = cell("num" + (node.slower ? " worse" : ""), "time"), error = cell("num", "error");
    if (leaf) formats(node, fmt);
    else if (s.flops) fmt.textContent = `${FXQ.percent(s.quantized / s.flops)} of FLOPs quantized`;
    size.textContent = leaf ? node.size : "";
    if (s.flops) flops.append(FXQ.si(s.flops), share(s.flops, total.flops, "all"));
    if (s.before) bytes.textContent = s.before === s.after ? FXQ.bytes(s.before) : `${FXQ.bytes(s.before)} → ${FXQ.bytes(s.after)}`;
    if (s.was || s.now) {
      const scale = Math.max(total.was, total.now);
      time.append(FXQ.us(s.now), share(s.now, scale, "now"), share(s.was, scale, "was"));
      if (node.slower) time.append(make("span", "slower", "slower"));
    }
    if (s.error) error.textContent = FXQ.percent(s.error);
    tr.append(first, fmt, size, flops, bytes);
    if (data.timed) tr.append(time);
    if (data.measured) tr.append(error);
    return tr;
  }

  function table(head, lines, name) {
    const element = make("table", name), top = make("tr");
    for (const [text, kind] of head) {
      const th = make("th", kind, text);
      th.scope = "col";
      top.append(th);
    }
    if (name.endsWith("stack")) for (const tr of lines) [...tr.cells].forEach((td, i) => { td.dataset.label = head[i][0]; });
    const inner = make("tbody");
    inner.append(...lines);
    element.append(make("thead"), inner);
    element.firstChild.append(top);
    return element;
  }
  const line = cells => {
    const tr = make("tr");
    for (const content of cells) {
      const td = content instanceof HTMLTableCellElement ? content : make("td");
      if (td !== content) td.append(content);
      tr.append(td);
    }
    return tr;
  };
  const block = (title, ...content) => {
    const div = make("div");
    if (title) div.append(make("h3", "", title));
    div.append(...content);
    return div;
  };

  function operandsOf(leaf) {
    const lines = leaf.gemms.map(([part, gemm, operands, flops]) => {
      const th = make("th", "", `${part} ${gemm}`.trim());
      th.scope = "row";
      return line([th, ...operands.map(o => {
        const td = make("td"), box = make("div"), under = make("span", "soft op");
        box.append(make("b", "", o[0]), ` ${o[1]} ${o[2]} `, make("br"), chip(o[4], o[3]));
        const size = o[5] === null ? "" : o[5] === o[6] ? FXQ.bytes(o[5]) : `${FXQ.bytes(o[5])} → ${FXQ.bytes(o[6])}`;
        under.textContent = [size, o[7]].filter(Boolean).join(" · ");
        box.append(under);
        td.append(box);
        return td;
      }), Object.assign(make("td", "num", flops ? FXQ.si(flops) : ""))]);
    });
    return table([["GEMM"], ["left operand"], ["right operand"], ["FLOP", "num"]], lines, "list stack");
  }

  function workOf(leaf) {
    const longest = Math.max(...leaf.work.map(w => Math.max(w[2] || 0, w[3] || 0)));
    const number = x => make("td", "num", x === null ? "" : x ? FXQ.us(x) : "–");
    const lines = leaf.work.map(([what, kernel, was, now]) => {
      const track = make("td", "track");
      for (const [value, name] of [[was, "was"], [now, "now"]]) if (value && longest) {
        const bar = make("i", name);
        bar.style.width = 100 * value / longest + "%";
        track.append(bar);
      }
      return line([what, kernel, ...(longest ? [number(was), number(now), track] : [])]);
    });
    const times = longest ? [["unquantized", "num"], ["quantized", "num"], [""]] : [];
    return table([["work"], ["kernel"], ...times], lines, "work list");
  }

  function detail(leaf, columns, flat) {
    const tr = make("tr", "detail"), td = make("td"), inner = make("div", "in");
    td.colSpan = columns;
    inner.style.setProperty("--level", flat ? 0 : leaf.level);
    for (const reason of leaf.reasons) {
      const facts = make("dl", "fact"), [meaning, remedy] = data.reasons[reason];
      for (const [name, text] of [["Not quantized", `${reason}: ${meaning.replaceAll("`", "")}`], ["What to do", remedy]]) facts.append(make("dt", "", name), make("dd", "", text));
      inner.append(facts);
    }
    const each = leaf.count > 1 ? `, each of ${leaf.count}` : "";
    inner.append(block(`Operands${each}`, operandsOf(leaf)));
    if (leaf.work.length) inner.append(block(`Kernels${leaf.us ? " and estimated times" : ""}${each}`, workOf(leaf)));
    if (leaf.reference) inner.append(block("", make("p", "worse", leaf.reference)));
    if (leaf.errors.length) {
      const lines = leaf.errors.map(([layer, error, lost]) => line([make("td", "mono", layer), make("td", "num", FXQ.percent(error)), lost]));
      inner.append(block("Measured errors", table([["layer"], ["relative error", "num"], ["elements that became zero"]], lines, "list")));
    }
    if (leaf.unfused.length) {
      const lines = leaf.unfused.map(fusion => line(fusion));
      inner.append(block("Not fused", table([["graph"], ["outcome and reason"], ["operator"]], lines, "list stack")));
    }
    for (const [graph, svg] of Object.entries(pictures[leaf.layer] || {})) {
      const slot = make("div", "picture");
      slot.innerHTML = svg;
      inner.append(block(`In the ${graph} graph`, slot));
    }
    if (data.undrawn && !pictures[leaf.layer]) inner.append(make("p", "soft", data.undrawn));
    if (leaf.form) inner.append(make("p", "soft", `Written as ${leaf.form}`));
    td.append(inner);
    tr.append(td);
    return tr;
  }

  function draw() {
    const flat = sort.value !== "model", all = rows();
    visible = all.slice(0, most);
    if (!visible.includes(chosen)) chosen = visible[0] || null;
    const columns = 5 + data.timed + data.measured, parts = [];
    for (const node of visible) {
      parts.push(row(node, flat));
      if (!node.nodes && opened.has(node)) parts.push(detail(node, columns, flat));
    }
    body.replaceChildren(...parts);
    at(".none").hidden = all.length > 0;
    const more = at(".more");
    more.hidden = all.length <= most;
    more.textContent = `Show ${Math.min(MORE, all.length - most)} more of ${all.length - most} rows`;
    for (const th of heads) {
      const here = th.dataset.key === sort.value;
      th.setAttribute("aria-sort", here && sort.value !== "model" ? (descending ? "descending" : "ascending") : "none");
      th.querySelector("span").textContent = here && sort.value !== "model" ? (descending ? " ↓" : " ↑") : "";
    }
  }
  const element = node => body.querySelector(`tr.row[data-index="${node.index}"]`);
  function choose(node) {
    const before = chosen && element(chosen), now = node && element(node);
    if (!now) return;
    if (before) before.tabIndex = -1;
    chosen = node;
    now.tabIndex = 0;
    now.focus();
  }
  function toggle(node, on) {
    if (node.nodes) node.open = on ?? !node.open;
    else if (on ?? !opened.has(node)) opened.add(node); else opened.delete(node);
    chosen = node;
    draw();
    element(node)?.focus();
  }
  function reveal() {
    let path = "";
    try { path = decodeURIComponent(location.hash.slice(1)); } catch { return; }
    if (!path.startsWith(data.prefix) || path === data.prefix) return;
    path = path.slice(data.prefix.length);
    const node = nodes.find(n => n.path === path) || leaves.find(leaf => same(leaf, path));
    if (!node) return;
    input.value = kind.value = "";
    words = [];
    if (!visible.includes(node)) sort.value = "model";
    for (let n = node.parent; n; n = n.parent) n.open = true;
    if (node.nodes) node.open = true; else opened.add(node);
    most = Math.max(most, rows().indexOf(node) + 1);
    chosen = node;
    draw();
    element(node).scrollIntoView({block: "center"});
    element(node).focus({preventScroll: true});
  }
  const same = (leaf, path) => {
    const wanted = path.toLowerCase().split(/[ .]+(?![^{]*})/);
    return wanted.length === leaf.parts.length && wanted.every((w, i) => samePart(leaf.parts[i], w, true));
  };

  input.oninput = () => { words = input.value.toLowerCase().split(/\s+/).filter(Boolean); most = MORE; draw(); };
  kind.onchange = () => { most = MORE; draw(); };
  sort.onchange = () => { descending = true; draw(); };
  at(".open").onclick = () => {  // modules first, then their rows
    const shut = nodes.some(node => node.nodes && !node.open);
    for (const node of nodes) if (node.nodes) node.open = true;
    if (!shut) for (const leaf of visible) if (!leaf.nodes) opened.add(leaf);
    draw();
  };
  at(".close").onclick = () => { for (const node of nodes) node.open = false; opened.clear(); draw(); };
  at(".more").onclick = () => { most += MORE; draw(); };
  new IntersectionObserver(seen => { if (seen[0].isIntersecting) at(".more").onclick(); }).observe(at(".more"));
  for (const th of heads) th.querySelector("button").onclick = () => {
    descending = sort.value === th.dataset.key ? !descending : true;
    sort.value = th.dataset.key;
    draw();
  };
  body.onclick = event => {
    const tr = event.target.closest("tr.row");
    if (!tr || event.target.closest("a")) return;
    toggle(nodes[tr.dataset.index]);
  };
  body.onkeydown = event => {
    const tr = event.target.closest("tr.row");
    if (!tr || event.target !== tr || event.ctrlKey || event.metaKey || event.altKey) return;
    const node = nodes[tr.dataset.index], place = visible.indexOf(node);
    const isOpen = node.nodes ? node.open : opened.has(node);
    const actions = {
      ArrowDown: () => choose(visible[place + 1]), ArrowUp: () => choose(visible[place - 1]),
      Home: () => choose(visible[0]), End: () => choose(visible.at(-1)),
      ArrowRight: () => isOpen && node.nodes ? choose(node.nodes[0]) : toggle(node, true),
      ArrowLeft: () => isOpen ? toggle(node, false) : node.parent && choose(node.parent),
      Enter: () => toggle(node), " ": () => toggle(node),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  };
  document.addEventListener("keydown", event => {
    if (event.key === "/" && !event.target.closest("input, select, textarea")) { event.preventDefault(); input.focus(); }
    if (event.key === "Escape" && event.target === input) { input.value = ""; input.oninput(); }
  });
  addEventListener("hashchange", reveal);
  root.querySelector(".frame").hidden = false;
  draw();
  reveal();
}
