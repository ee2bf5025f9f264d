"use strict";
(() => {
  const result = JSON.parse(document.getElementById("data").textContent);
  const main = result.runs[0];
  const base = result.runs[1] || null;
  const SVG = "http://www.w3.org/2000/svg";
  const tip = document.getElementById("tip");
  let scale = "linear";
  let session = main.turns.length ? main.turns[0].session : "";

  const count = (n) => n.toLocaleString("en-US");
  const seconds = (ms) => (ms < 99.95 ? ms.toFixed(ms < 9.995 ? 2 : 1) + " ms" : fullSeconds(ms));
  const fullSeconds = (ms) => (ms >= 10000 ? (ms / 1000).toFixed(1) : ms >= 1000 ? (ms / 1000).toFixed(2) : (ms / 1000).toFixed(3)) + " s";
  const short = (ms) => (ms >= 1000 ? +(ms / 1000).toPrecision(3) + " s" : ms === 0 ? "0" : +ms.toPrecision(3) + " ms");

  function element(name, attributes, parent) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    parent.append(node);
    return node;
  }

  // One row per turn of the chosen session; the baseline's turn is found by its number, since either run may be cut short.
  function turns() {
    return main.turns.filter((t) => t.session === session).map((t) => ({
      on: t, off: base ? base.turns.find((b) => b.session === t.session && b.index === t.index) || null : null,
    }));
  }

  function niceStep(top, ticks) {
    const raw = top / ticks;
    const unit = 10 ** Math.floor(Math.log10(raw));
    return unit * [1, 2, 2.5, 5, 10].find((m) => m * unit >= raw);
  }

  function axis(top, low, height, log) {
    if (!log) {
      const step = niceStep(top, 4);
      const ceiling = Math.ceil(top / step) * step;
      const ticks = [];
      for (let v = 0; v <= ceiling + step / 2; v += step) ticks.push(v);
      return { ticks, y: (v) => height * (1 - v / ceiling) };
    }
    const first = Math.floor(Math.log10(low));
    const last = Math.max(first + 1, Math.ceil(Math.log10(top)));
    const ticks = [];
    for (let e = first; e <= last; e++) ticks.push(10 ** e);
    return { ticks, y: (v) => height * (1 - (Math.log10(Math.max(v, 10 ** first)) - first) / (last - first)) };
  }

  // columns: for each turn a list of stacks, each a list of {value, color}, drawn side by side.
  function chart(holder, rows, { columns, values, format, log, describe, marks }) {
    const width = Math.max(holder.clientWidth, 260);
    const phone = width < 560;
    const height = phone ? 200 : 250;
    const left = phone ? 44 : 56;
    const positive = values.filter((v) => v > 0);
    holder.replaceChildren();
    if (!positive.length) { holder.textContent = "Nothing was measured."; return; }
    const { ticks, y } = axis(Math.max(...positive), Math.min(...positive), height, log);
    const svg = element("svg", { viewBox: `0 0 ${width} ${height + 44}`, height: height + 44, role: "group" }, holder);
    const plot = element("g", { transform: `translate(${left},14)` }, svg);
    const inner = width - left - 4;
    for (const value of ticks) {
      element("line", { class: "grid", x1: 0, x2: inner, y1: y(value), y2: y(value) }, plot);
      const text = element("text", { x: -8, y: y(value) + 4, "text-anchor": "end" }, plot);
      text.textContent = format(value);
    }
    const slot = inner / rows.length;
    rows.forEach((row, i) => {
      const stacks = columns(row);
      const group = element("g", { class: "turn", tabindex: i ? -1 : 0, role: "img", transform: `translate(${i * slot},0)` }, plot);
      const lines = describe(row);
      group.setAttribute("aria-label", lines.map((l) => l.join(" ")).join(", "));
      element("rect", { class: "hit", x: 1, y: -8, width: slot - 2, height: height + 8, rx: 5 }, group);
      const gap = Math.min(3, slot * 0.06);
      const bar = Math.min(26, (slot * 0.74 - gap * (stacks.length - 1)) / stacks.length);
      const start = (slot - bar * stacks.length - gap * (stacks.length - 1)) / 2;
      stacks.forEach((stack, s) => {
        let below = 0;
        for (const part of stack) {
          if (!(part.value > 0)) continue;
          const top = y(below + part.value);
          const bottom = log ? height : y(below);
          element("rect", { x: start + s * (bar + gap), y: top, width: bar, height: Math.max(bottom - top, 1.5), rx: 2, fill: part.color }, group);
          below += part.value;
        }
      });
      if (marks && !phone) {
        const mark = marks(row);
        if (mark) { const t = element("text", { class: "mark", x: start + (stacks.length - 1) * (bar + gap) + bar / 2, y: mark.y(y) - 5, "text-anchor": "middle" }, group); t.textContent = mark.text; }
      }
      const every = Math.ceil(24 / slot);
      if (i % every === 0) { const t = element("text", { x: slot / 2, y: height + 18, "text-anchor": "middle" }, group); t.textContent = row.on.index + 1; }
      const show = () => tell(group, lines);
      group.addEventListener("pointerenter", show);
      group.addEventListener("focus", show);
      group.addEventListener("pointerleave", hide);
      group.addEventListener("blur", hide);
      group.addEventListener("keydown", (event) => {
        const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: rows.length - 1 }[event.key];
        if (event.key === "Escape") hide();
        const groups = plot.querySelectorAll("g.turn");
        if (to === undefined || !groups[to]) return;
        event.preventDefault();
        group.setAttribute("tabindex", -1);
        groups[to].setAttribute("tabindex", 0);
        groups[to].focus();
      });
    });
    element("line", { class: "axis", x1: 0, x2: inner, y1: height, y2: height }, plot);
  }

  function tell(node, lines) {
    tip.replaceChildren();
    const title = document.createElement("b");
    title.textContent = lines[0].join(" ");
    tip.append(title);
    for (const [name, value] of lines.slice(1)) {
      const row = document.createElement("div");
      for (const text of [name, value]) { const span = document.createElement("span"); span.textContent = text; row.append(span); }
      tip.append(row);
    }
    tip.hidden = false;
    const box = node.getBoundingClientRect();
    const at = Math.min(Math.max(8, box.left + box.width / 2 - tip.offsetWidth / 2), document.documentElement.clientWidth - tip.offsetWidth - 8);
    tip.style.left = `${at + window.scrollX}px`;
    tip.style.top = `${Math.max(box.top - tip.offsetHeight - 6, 4) + window.scrollY}px`;
  }
  function hide() { tip.hidden = true; }

  function legend(id, entries) {
    document.getElementById(id).replaceChildren(...entries.map(([color, text]) => {
      const item = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.style.background = color;
      item.append(swatch, text);
      return item;
    }));
  }

  function name(turn) { return [`Turn ${turn.index + 1}`, `· ${turn.label}`]; }

  function draw() {
    hide();
    const rows = turns();
    const time = (turn) => (turn && turn.ttft_ms) || 0;
    chart(document.getElementById("ttft-chart"), rows, {
      log: scale === "log",
      columns: (r) => [[{ value: time(r.on), color: "var(--main)" }], ...(base ? [[{ value: time(r.off), color: "var(--base)" }]] : [])],
      values: rows.flatMap((r) => [time(r.on), time(r.off)]),
      format: short,
      describe: (r) => [name(r.on), [main.name, r.on.ttft_ms === null ? "failed" : seconds(r.on.ttft_ms)],
        ...(r.off && r.off.ttft_ms !== null ? [[base.name, seconds(r.off.ttft_ms)]] : []),
        ...(time(r.on) && time(r.off) ? [[`${base.name} ÷ ${main.name}`, (time(r.off) / time(r.on)).toFixed(1) + "×"]] : [])],
      marks: (r) => (time(r.on) && time(r.off) && time(r.off) / time(r.on) >= 1.5
        ? { text: (time(r.off) / time(r.on)).toFixed(time(r.off) / time(r.on) < 10 ? 1 : 0) + "×", y: (y) => Math.min(y(time(r.on)), y(time(r.off))) } : null),
    });
    const fresh = (t) => (t.prompt_tokens || 0) - (t.cached_tokens || 0);
    chart(document.getElementById("tokens-chart"), rows, {
      log: false,
      columns: (r) => [[{ value: r.on.cached_tokens || 0, color: "var(--cached)" }, { value: fresh(r.on), color: "var(--new)" }]],
      values: rows.map((r) => r.on.prompt_tokens || 0),
      format: count,
      describe: (r) => [name(r.on), ["Prompt", count(r.on.prompt_tokens || 0)], ["From cache", r.on.cached_tokens === null ? "not reported" : count(r.on.cached_tokens)],
        ["Computed", count(fresh(r.on))]],
    });
  }

  const sessions = [...new Set(main.turns.map((t) => t.session))];
  const picker = document.getElementById("session");
  function choose(value) {
    session = value;
    for (const row of document.querySelectorAll("#turns tbody tr")) row.hidden = row.dataset.session !== session;
    draw();
  }
  if (sessions.length > 1) {
    document.getElementById("pick").hidden = false;
    picker.append(...sessions.map((id) => new Option(id, id)));
    picker.addEventListener("change", () => choose(picker.value));
  }

  for (const button of document.querySelectorAll("[data-scale]")) {
    button.addEventListener("click", () => {
      scale = button.dataset.scale;
      for (const other of document.querySelectorAll("[data-scale]")) other.setAttribute("aria-pressed", String(other === button));
      draw();
    });
  }

  for (const id of ["ttft-panel", "tokens-panel"]) document.getElementById(id).hidden = !main.turns.length;
  legend("ttft-legend", [["var(--main)", main.name], ...(base ? [["var(--base)", base.name]] : [])]);
  legend("tokens-legend", [["var(--cached)", "From the prefix cache"], ["var(--new)", "Computed in this turn"]]);
  if (main.turns.length) choose(session);
  let width = 0;
  new ResizeObserver(() => {
    const now = document.getElementById("ttft-chart").clientWidth;
    if (now !== width) { width = now; draw(); }
  }).observe(document.getElementById("ttft-chart"));
})();
