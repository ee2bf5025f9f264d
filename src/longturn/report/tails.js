// Bars of one latency by turn number, for one or two points.
const Tails = (() => {
  const { compact, time, color, node, ticks, tell, hide } = Draw;

  // chosen: [{name, s, faint, turns}], turns as in the point's file; statistic: a key of its spreads.
  function draw(holder, chosen, title, field, statistic, label) {
    const groups = [...new Set(chosen.flatMap((one) => one.turns.map((t) => t.first)))].sort((a, b) => a - b);
    const of = (one, first) => one.turns.find((t) => t.first === first);
    const value = (one, first) => { const t = of(one, first); return t && t[field] ? t[field][statistic] : null; };
    const top = Math.max(...chosen.flatMap((one) => groups.map((g) => value(one, g) || 0)));
    if (!(top > 0)) return;
    const width = Math.max(holder.clientWidth, 240);
    const height = 84;
    const left = 56;
    const svg = node("svg", { viewBox: `0 0 ${width} ${height + 46}`, height: height + 46, role: "group", "aria-label": `${title} by turn number` }, holder);
    const plot = node("g", { transform: `translate(${left},24)` }, svg);
    node("text", { class: "title", x: -left, y: -10 }, plot, `${title} ${label}`);
    const marks = ticks(0, top, 3);
    const ceiling = Math.max(top * 1.05, marks[marks.length - 1]);
    const y = (v) => height * (1 - v / ceiling);
    const inner = width - left - 4;
    for (const v of marks) {
      node("line", { class: "grid", x1: 0, x2: inner, y1: y(v), y2: y(v) }, plot);
      node("text", { x: -8, y: y(v) + 4, "text-anchor": "end" }, plot, v === 0 ? "0" : marks[marks.length - 1] >= 1000 ? +(v / 1000).toPrecision(3) + " s" : compact(v) + " ms");
    }
    const slot = inner / groups.length;
    groups.forEach((first, k) => {
      const group = of(chosen[0], first) || { first, last: first };
      const name = group.last > first ? `${first + 1}–${group.last + 1}` : String(first + 1);
      const bar = Math.min(26, (slot * 0.7) / chosen.length);
      chosen.forEach((one, c) => {
        const v = value(one, first);
        if (v === null) return;
        const x = k * slot + slot / 2 + (c - chosen.length / 2) * bar;
        const made = node("rect", { class: "tail", x: x + 1, y: y(v), width: bar - 2, height: Math.max(height - y(v), 1), rx: 2, fill: color(one.s), "fill-opacity": one.faint ? 0.5 : 1, role: "img", "aria-label": `${one.name}, turns ${name}: ${time(v)}` }, plot);
        const lines = [[`Turns ${name}`], [one.name, time(v)], ["Responses", String(of(one, first)[field].count)]];
        made.addEventListener("pointerenter", () => tell(made, lines));
        made.addEventListener("pointerleave", hide);
      });
      node("text", { x: k * slot + slot / 2, y: height + 17, "text-anchor": "middle" }, plot, name);
    });
    node("line", { class: "axis", x1: 0, x2: inner, y1: height, y2: height }, plot);
  }
  return { draw };
})();
