// One session tree request by request, and the server's queue and cache over the same time.
const Timeline = (() => {
  const { NONE, compact, time, percent, color, node, ticks, tell, hide } = Draw;
  const minutes = (top) => (top >= 3e6 ? [(v) => compact(v / 6e4), "minutes"] : [(v) => compact(v / 1000), "seconds"]);

  function axis(plot, top, inner, height) {
    const [write, unit] = minutes(top);
    for (const v of ticks(0, top, inner < 420 ? 4 : 8)) {
      const x = (v / top) * inner;
      node("line", { class: "grid", x1: x, x2: x, y1: 0, y2: height }, plot);
      node("text", { x, y: height + 16, "text-anchor": "middle" }, plot, write(v));
    }
    node("line", { class: "axis", x1: 0, x2: inner, y1: height, y2: height }, plot);
    node("text", { class: "title", x: inner, y: height + 32, "text-anchor": "end" }, plot, `${unit} since the measurement began →`);
  }

  // A lane for each agent, a bar for each request: waiting for the first token, then the answer.
  function tree(holder, timeline, s, top) {
    const agents = [...new Set(timeline.requests.map((r) => r.agent))];
    const width = Math.max(holder.clientWidth, 280);
    const left = width < 560 ? 84 : 130;
    const inner = width - left - 8;
    const lane = 26;
    const height = agents.length * lane;
    const svg = node("svg", { viewBox: `0 0 ${width} ${height + 48}`, height: height + 48, role: "group", "aria-label": `Requests of ${timeline.session}` }, holder);
    const plot = node("g", { transform: `translate(${left},8)` }, svg);
    axis(plot, top, inner, height);
    const letters = Math.floor((left - 12) / 6.6);
    agents.forEach((agent, k) => {
      const name = node("text", { x: -8, y: k * lane + lane / 2 + 4, "text-anchor": "end" }, plot, agent.length > letters ? agent.slice(0, letters - 1) + "…" : agent);
      node("title", {}, name, agent);
      node("line", { class: "grid", x1: 0, x2: inner, y1: (k + 1) * lane, y2: (k + 1) * lane }, plot);
    });
    const x = (ms) => (ms / top) * inner;
    timeline.requests.forEach((r, k) => {
      const group = node("g", { class: "request", tabindex: k ? -1 : 0, role: "img" }, plot);
      const y = agents.indexOf(r.agent) * lane + 5;
      const first = r.first_ms === null ? r.end_ms : r.first_ms;
      const bar = (from, to, attributes) => node("rect", { x: x(from), y, width: Math.max(x(to) - x(from), 1.2), height: lane - 10, ...attributes }, group);
      if (r.error !== null) bar(r.start_ms, r.end_ms, { class: "failed" });
      else {
        bar(r.start_ms, first, { class: "wait" });
        if (r.end_ms > first) bar(first, r.end_ms, { fill: color(s) });
      }
      const lines = [[`${r.agent}, turn ${r.index + 1}`], ["Prompt tokens", r.prompt_tokens === null ? NONE : compact(r.prompt_tokens)], ["From cache", r.cached_tokens === null ? "not reported" : compact(r.cached_tokens)], ["Output tokens", r.output_tokens === null ? NONE : compact(r.output_tokens)],
        ["TTFT", r.first_ms === null ? NONE : time(r.first_ms - r.start_ms)], ["End to end", time(r.end_ms - r.start_ms)]];
      if (r.error !== null) lines.push(["Failed", r.error]);
      group.setAttribute("aria-label", lines.map((l) => l.join(" ")).join(", "));
      group.addEventListener("pointerenter", () => tell(group, lines));
      group.addEventListener("focus", () => tell(group, lines));
      group.addEventListener("pointerleave", hide);
      group.addEventListener("blur", hide);
      group.addEventListener("keydown", (event) => {
        const to = { ArrowRight: k + 1, ArrowDown: k + 1, ArrowLeft: k - 1, ArrowUp: k - 1, Home: 0, End: timeline.requests.length - 1 }[event.key];
        const all = plot.querySelectorAll("g.request");
        if (to === undefined || !all[to]) return;
        event.preventDefault();
        group.setAttribute("tabindex", -1);
        all[to].setAttribute("tabindex", 0);
        all[to].focus({ preventScroll: true });
      });
    });
  }

  // lines: [{name, of, className}] of the samples; values are drawn from 0 to ceiling.
  function series(holder, samples, title, lines, ceiling, format, top) {
    const width = Math.max(holder.clientWidth, 280);
    const left = width < 560 ? 84 : 130;
    const inner = width - left - 8;
    const height = 84;
    const svg = node("svg", { viewBox: `0 0 ${width} ${height + 72}`, height: height + 72, role: "img", "aria-label": `${title} over time` }, holder);
    const plot = node("g", { transform: `translate(${left},24)` }, svg);
    node("text", { class: "title", x: -left, y: -10 }, plot, title);
    axis(plot, top, inner, height);
    const y = (v) => height * (1 - v / ceiling);
    for (const v of ticks(0, ceiling, 2)) {
      node("line", { class: "grid", x1: 0, x2: inner, y1: y(v), y2: y(v) }, plot);
      node("text", { x: -8, y: y(v) + 4, "text-anchor": "end" }, plot, format(v));
    }
    for (const line of lines) {
      // Steps: between two samples nothing is known, and the last value stands.
      let path = "";
      for (const sample of samples) {
        const v = line.of(sample);
        if (v === null) { path += " "; continue; }
        const at = `${((sample.at_ms / top) * inner).toFixed(1)}`;
        path += path === "" || path.endsWith(" ") ? `M${at},${y(v).toFixed(1)}` : `H${at}V${y(v).toFixed(1)}`;
      }
      node("path", { class: `sample ${line.className}`, d: path.trim() }, plot);
    }
  }

  // Draws what the point has; returns whether that is anything.
  function draw(holder, point, s) {
    holder.replaceChildren();
    const requests = point.timeline ? point.timeline.requests : [];
    const top = Math.max(0, ...requests.map((r) => r.end_ms), ...point.server.map((v) => v.at_ms));
    if (!(top > 0)) return false;
    if (requests.length) tree(holder, point.timeline, s, top);
    const counts = point.server.flatMap((v) => [v.running, v.waiting]).filter((v) => v !== null);
    if (counts.length) {
      series(holder, point.server, "Requests running (line) and waiting (dashes)", [{ of: (v) => v.running, className: "running" }, { of: (v) => v.waiting, className: "waiting" }], Math.max(1, ...counts) * 1.05, rate0, top);
    }
    if (point.server.some((v) => v.cache_used !== null)) {
      series(holder, point.server, "Pages held by running requests", [{ of: (v) => v.cache_used, className: "running" }], 1, (v) => percent(v).replace(".0", ""), top);
    }
    return true;
  }
  const rate0 = (v) => String(Math.round(v * 10) / 10);
  return { draw };
})();
