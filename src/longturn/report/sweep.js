(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { points, series } = data;
  const $ = (id) => document.getElementById(id);
  const { color, shape, compact, axisText, time, rate, percent, node, html, marker, ticks, logTicks, tell } = Draw;
  const { STATISTICS, X_AXES, spread } = Figures;
  const figure = (p, field) => Figures.figure(p, field, state.statistic);
  const currency = Figures.currency(points);
  const Y_AXES = Figures.yAxes(currency);

  // --- state ---

  const state = {
    statistic: "p90", x: X_AXES[0], y: Y_AXES[0], baseline: data.baseline, log: false, view: null,
    shown: series.map(() => true), a: null, b: null, levels: [],
  };
  const owner = []; // the series of each point
  series.forEach((one, s) => one.points.forEach((p) => { owner[p] = s; }));
  const pointName = (i) => `${series[owner[i]].name}, ${points[i].concurrency} live`;
  const statisticName = () => STATISTICS.find(([id]) => id === state.statistic)[1];

  // Points that can be drawn on the chosen axes: {i, s, x, y, valid, front}.
  function plotted(x = state.x, y = state.y) {
    const marks = [];
    series.forEach((one, s) => {
      const mine = [];
      for (const i of one.points) {
        const mark = { i, s, x: x.of(points[i], state.statistic), y: y.of(points[i]), valid: points[i].validity.valid, front: false };
        if (mark.x > 0 && mark.y > 0 && Number.isFinite(mark.x) && Number.isFinite(mark.y)) mine.push(mark);
      }
      const able = mine.filter((m) => m.valid);
      for (const k of Curves.nonDominated(able.map((m) => [m.x, m.y]), x.lower)) able[k].front = true;
      marks.push(...mine);
    });
    return marks;
  }
  // Both ends of a simulated point's uncertainty on the chosen axes; null where there is none.
  function ends(mark) {
    const p = points[mark.i];
    if (!p.band) return null;
    const found = [p.band.slow, p.band.fast].map((bound) => {
      const other = { ...p, metrics: { ...p.metrics, ...bound } };
      return [state.x.of(other, state.statistic), state.y.of(other)];
    });
    return found.every(([x, y]) => x > 0 && y > 0) && found.some(([x, y]) => x !== mark.x || y !== mark.y) ? found : null;
  }
  function curve(marks, s) {
    const mine = marks.filter((m) => m.s === s && m.front).map((m) => [m.x, m.y]).sort((a, b) => a[0] - b[0]);
    return mine.length ? Curves.steffen(mine) : null;
  }

  // --- the chart ---

  function full(marks) {
    const xs = marks.map((m) => m.x);
    const ys = marks.map((m) => m.y);
    const pad = (Math.max(...xs) - Math.min(...xs)) * 0.06 || Math.max(...xs) * 0.3;
    const top = Math.max(...ys);
    return {
      x0: Math.max(0, Math.min(...xs) - pad), x1: Math.max(...xs) + pad,
      y0: state.log ? Math.min(...ys) / 1.25 : 0, y1: state.log ? top * 1.25 : top * 1.13,
    };
  }

  let frame = null; // the chart as drawn: scales and marks, for the pointer
  function drawChart() {
    hide();
    const all = plotted();
    const marks = all.filter((m) => state.shown[m.s]);
    const holder = $("chart");
    const focused = holder.contains(document.activeElement) ? document.activeElement.dataset.i : null;
    holder.replaceChildren();
    frame = null;
    const better = state.x.lower ? "left" : "right";
    $("frontier-title").textContent = `${state.y.name} against ${state.x.name.toLowerCase()}`;
    $("frontier-text").textContent = `Up and to the ${better} is better. Lines join the points that no other of the same configuration beats.`;
    if (!marks.length) {
      html("p", holder, all.length ? "Every configuration is hidden." : "No point has both of these figures.", "empty");
      return;
    }
    const width = Math.max(holder.clientWidth, 280);
    const phone = width < 560;
    const height = phone ? 290 : 400;
    const left = phone ? 50 : 64;
    const inner = { w: width - left - 10, h: height - 62 };
    const view = state.view || full(marks);
    const lx = (v) => ((v - view.x0) / (view.x1 - view.x0)) * inner.w;
    const ly = state.log
      ? (v) => inner.h * (1 - Math.log(v / view.y0) / Math.log(view.y1 / view.y0))
      : (v) => inner.h * (1 - (v - view.y0) / (view.y1 - view.y0));
    const svg = node("svg", { viewBox: `0 0 ${width} ${height + 8}`, height: height + 8, role: "group", "aria-label": `${$("frontier-title").textContent}, ${marks.length} points` }, holder);
    const plot = node("g", { transform: `translate(${left},24)` }, svg);
    const written = axisText(view.y1);
    for (const v of state.log ? logTicks(view.y0, view.y1) : ticks(view.y0, view.y1, phone ? 5 : 6)) {
      node("line", { class: "grid", x1: 0, x2: inner.w, y1: ly(v), y2: ly(v) }, plot);
      node("text", { x: -8, y: ly(v) + 4, "text-anchor": "end" }, plot, written(v));
    }
    for (const v of ticks(view.x0, view.x1, phone ? 4 : 8)) {
      node("line", { class: "grid", x1: lx(v), x2: lx(v), y1: 0, y2: inner.h }, plot);
      node("text", { x: lx(v), y: inner.h + 17, "text-anchor": "middle" }, plot, compact(v));
    }
    node("line", { class: "axis", x1: 0, x2: inner.w, y1: inner.h, y2: inner.h }, plot);
    node("text", { class: "title", x: inner.w, y: inner.h + 35, "text-anchor": "end" }, plot, `${statisticName()} ${state.x.name.toLowerCase()}, ${state.x.unit} ${state.x.lower ? "(lower is better)" : "→"}`);
    node("text", { class: "title", x: 8 - left, y: -11 }, plot, `${state.y.name}, ${state.y.unit} ↑`);
    // A nested svg clips what a zoomed view leaves outside.
    const clip = node("svg", { class: "clip", x: 0, y: 0, width: inner.w, height: inner.h }, plot);
    const catcher = node("rect", { class: "catcher", width: inner.w, height: inner.h }, clip);
    const curves = series.map((_, s) => (state.shown[s] ? curve(marks, s) : null));
    curves.forEach((one, s) => {
      if (!one || one.points.length < 2) return;
      const first = one.points[0][0];
      const span = one.points[one.points.length - 1][0] - first;
      const steps = 48 * (one.points.length - 1);
      const xs = new Set(one.points.map((p) => p[0]));
      for (let k = 0; k <= steps; k++) xs.add(first + (span * k) / steps);
      const line = [...xs].sort((a, b) => a - b).map((x) => `${lx(x).toFixed(2)},${ly(one.at(x).value).toFixed(2)}`).join("L");
      node("path", { class: "curve", d: "M" + line, stroke: color(s), "stroke-dasharray": series[s].source === "measured" ? "none" : "7 5" }, clip);
    });
    const cross = node("line", { class: "cross", y1: 0, y2: inner.h, visibility: "hidden" }, clip);
    const box = node("rect", { class: "box", visibility: "hidden" }, clip);
    const order = [...marks].sort((p, q) => p.x - q.x || p.y - q.y);
    const inView = (m) => m.x >= view.x0 && m.x <= view.x1 && m.y >= view.y0 && m.y <= view.y1;
    const within = order.filter(inView);
    const numbers = []; // where a number of live trees stands already
    const few = curves.filter(Boolean).length <= 4; // more curves than these leave no room for numbers
    const isChosen = (m) => m.i === state.a || m.i === state.b;
    for (const mark of [...order.filter((m) => !isChosen(m)), ...order.filter(isChosen)]) {
      const chosen = mark.i === state.a ? "A" : mark.i === state.b ? "B" : "";
      const group = node("g", { class: "point" + (mark.front ? "" : " behind") + (mark.valid ? "" : " invalid"), role: "button", "data-i": mark.i, tabindex: -1 }, clip);
      group.setAttribute("aria-label", describe(mark).map((l) => l.join(" ")).join(", "));
      group.setAttribute("aria-pressed", String(Boolean(chosen)));
      const [px, py] = [lx(mark.x), ly(mark.y)];
      const band = ends(mark);
      if (band) node("path", { class: "band", d: "M" + band.map(([x, y]) => `${lx(x).toFixed(2)},${ly(y).toFixed(2)}`).join("L"), stroke: color(mark.s) }, group);
      if (chosen) node("circle", { class: "ring", cx: px, cy: py, r: 11, stroke: color(mark.s) }, group);
      marker(shape(mark.s), px, py, 5.2, mark.valid ? { fill: color(mark.s), class: "dot" } : { fill: "var(--panel)", stroke: color(mark.s), "stroke-width": 1.6 }, group);
      if (!mark.valid) node("path", { d: `M${px - 2.4},${py - 2.4}l4.8,4.8m0,-4.8l-4.8,4.8`, stroke: color(mark.s), "stroke-width": 1.4 }, group);
      if (chosen) node("text", { class: "letter halo", x: px, y: py - 15, "text-anchor": "middle" }, group, chosen);
      else if (few && mark.front && numbers.every(([x, y]) => Math.hypot(x - px, y - py) > 24)) {
        node("text", { class: "number halo", x: px, y: py - 10, "text-anchor": "middle" }, group, points[mark.i].concurrency);
        numbers.push([px, py]);
      }
      group.addEventListener("focus", () => tell(group, describe(mark)));
      group.addEventListener("blur", hide);
    }
    const groups = new Map([...clip.querySelectorAll("g.point")].map((g) => [Number(g.dataset.i), g]));
    const entry = within.find((m) => String(m.i) === focused) || within[0];
    if (entry) {
      groups.get(entry.i).setAttribute("tabindex", 0);
      if (focused !== null) groups.get(entry.i).focus({ preventScroll: true });
    }
    frame = { svg, clip, catcher, cross, box, marks: within, groups, curves, view, inner, left, lx, ly };
    $("hint").textContent = few && numbers.length ? "Numbers are live session trees. " : "";
    $("hint").textContent += matchMedia("(pointer: coarse)").matches ? "Tap a point for its figures and to choose it." : "Drag to zoom, double-click for all. With the keyboard: Tab to the chart, arrows between points, Enter to choose A and B, + and − to zoom, 0 for all.";
  }

  function describe(mark) {
    const p = points[mark.i];
    const lines = [[series[mark.s].name], ["Live trees", String(p.concurrency)], [state.y.name, `${compact(mark.y)} ${state.y.unit}`]];
    lines.push([`Interactivity ${statisticName()}`, `${rate(figure(p, "interactivity"))} tok/s`]);
    for (const [name, field] of [["TTFT", "ttft_ms"], ["ITL", "itl_ms"], ["End to end", "e2e_ms"], ["Job", "jobs"]]) {
      if (spread(p, field)) lines.push([`${name} ${statisticName()}`, time(figure(p, field))]);
    }
    if (p.metrics.hit_rate !== null) lines.push(["Cache hits", percent(p.metrics.hit_rate)]);
    if (p.metrics.errors) lines.push(["Errors", `${p.metrics.errors} of ${p.metrics.requests}`]);
    if (p.source !== "measured") lines.push(["Source", p.source]);
    if (p.band && p.band.slow.interactivity && p.band.fast.interactivity) {
      lines.push(["Uncertainty", `±${Math.round(100 * p.band.relative)} % of a step's time: ${rate(p.band.slow.interactivity[state.statistic])} to ${rate(p.band.fast.interactivity[state.statistic])} tok/s`]);
    }
    if (!mark.valid) lines.push(["Invalid", p.validity.reasons.join("; ")]);
    return lines;
  }

  function hide() { Draw.hide(); if (frame) frame.cross.setAttribute("visibility", "hidden"); }

  // --- pointer and keyboard on the chart ---

  let drag = null;
  const where = (event) => {
    const box = frame.catcher.getBoundingClientRect();
    return { x: ((event.clientX - box.left) / box.width) * frame.inner.w, y: ((event.clientY - box.top) / box.height) * frame.inner.h, box };
  };
  function nearest(at, reach) {
    let best = null;
    for (const m of frame.marks) {
      const d = Math.hypot(frame.lx(m.x) - at.x, frame.ly(m.y) - at.y);
      if (d <= reach) { reach = d; best = m; }
    }
    return best;
  }
  const inverse = (px, py) => {
    const { view, inner } = frame;
    const part = 1 - py / inner.h;
    return { x: view.x0 + (px / inner.w) * (view.x1 - view.x0), y: state.log ? view.y0 * (view.y1 / view.y0) ** part : view.y0 + part * (view.y1 - view.y0) };
  };
  $("chart").addEventListener("pointermove", (event) => {
    if (!frame) return;
    const at = where(event);
    if (drag) {
      const x = Math.min(Math.max(at.x, 0), frame.inner.w);
      const y = Math.min(Math.max(at.y, 0), frame.inner.h);
      drag.to = { x, y };
      const big = Math.hypot(x - drag.from.x, y - drag.from.y) > 6;
      frame.box.setAttribute("visibility", big ? "visible" : "hidden");
      for (const [k, v] of Object.entries({ x: Math.min(x, drag.from.x), y: Math.min(y, drag.from.y), width: Math.abs(x - drag.from.x), height: Math.abs(y - drag.from.y) })) frame.box.setAttribute(k, v);
      if (big) hide();
      return;
    }
    const mark = nearest(at, event.pointerType === "touch" ? 28 : 18);
    frame.svg.classList.toggle("over", Boolean(mark));
    if (mark) { hide(); tell(frame.groups.get(mark.i), describe(mark)); return; }
    if (at.x < 0 || at.x > frame.inner.w || at.y < 0 || at.y > frame.inner.h || event.pointerType === "touch") { hide(); return; }
    const x = inverse(at.x, at.y).x;
    const lines = [[`At ${compact(x)} ${state.x.unit}`]];
    frame.curves.forEach((one, s) => {
      if (!one) return;
      const value = one.at(x);
      if (value.place === "inside") lines.push([series[s].name, compact(value.value)]);
    });
    hide();
    if (lines.length === 1) return;
    frame.cross.setAttribute("x1", at.x);
    frame.cross.setAttribute("x2", at.x);
    frame.cross.setAttribute("visibility", "visible");
    tell(null, lines, { left: event.clientX, width: 0, top: event.clientY, height: 0 });
  });
  $("chart").addEventListener("pointerleave", () => { if (!drag) hide(); });
  $("chart").addEventListener("pointerdown", (event) => {
    if (!frame || event.button !== 0 || event.pointerType === "touch") return;
    const at = where(event);
    if (at.x < -4 || at.y < -4 || at.x > frame.inner.w + 4 || at.y > frame.inner.h + 4) return;
    event.preventDefault();
    drag = { from: { x: Math.max(at.x, 0), y: Math.max(at.y, 0) }, to: null };
    $("chart").setPointerCapture(event.pointerId);
  });
  $("chart").addEventListener("pointerup", () => {
    if (!drag || !frame) { drag = null; return; }
    const { from, to } = drag;
    drag = null;
    frame.box.setAttribute("visibility", "hidden");
    if (to && Math.abs(to.x - from.x) > 8 && Math.abs(to.y - from.y) > 8) {
      const low = inverse(Math.min(from.x, to.x), Math.max(from.y, to.y));
      const high = inverse(Math.max(from.x, to.x), Math.min(from.y, to.y));
      state.view = { x0: low.x, x1: high.x, y0: low.y, y1: high.y };
      drawChart();
    }
  });
  $("chart").addEventListener("pointercancel", () => { drag = null; });
  $("chart").addEventListener("click", (event) => {
    if (!frame) return;
    const mark = nearest(where(event), 18);
    if (mark) choose(mark.i);
  });
  $("chart").addEventListener("dblclick", () => { state.view = null; drawChart(); });
  $("chart").addEventListener("keydown", (event) => {
    const group = event.target.closest("g.point");
    if (!frame || !group) return;
    const place = frame.marks.findIndex((m) => m.i === Number(group.dataset.i));
    const to = { ArrowRight: place + 1, ArrowUp: place + 1, ArrowLeft: place - 1, ArrowDown: place - 1, Home: 0, End: frame.marks.length - 1 }[event.key];
    const actions = {
      Enter: () => choose(frame.marks[place].i), " ": () => choose(frame.marks[place].i), Escape: hide,
      "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), 0: () => { state.view = null; drawChart(); },
    };
    if (to === undefined && !actions[event.key]) return;
    event.preventDefault();
    if (to === undefined) { actions[event.key](); return; }
    if (!frame.marks[to]) return;
    group.setAttribute("tabindex", -1);
    const next = frame.groups.get(frame.marks[to].i);
    next.setAttribute("tabindex", 0);
    next.focus({ preventScroll: true });
  });
  function zoom(factor) {
    if (!frame) return;
    const { view } = frame;
    // Around the focused point, or the middle.
    const focused = frame.marks.find((m) => frame.groups.get(m.i) === document.activeElement);
    const cx = focused ? focused.x : (view.x0 + view.x1) / 2;
    const around = (low, high, c) => [c - (c - low) * factor, c + (high - c) * factor];
    const [x0, x1] = around(view.x0, view.x1, cx);
    let y0, y1;
    if (state.log) {
      const cy = focused ? focused.y : Math.sqrt(view.y0 * view.y1);
      [y0, y1] = around(Math.log(view.y0), Math.log(view.y1), Math.log(cy)).map(Math.exp);
    } else {
      [y0, y1] = around(view.y0, view.y1, focused ? focused.y : (view.y0 + view.y1) / 2);
      y0 = Math.max(0, y0);
    }
    state.view = { x0: Math.max(0, x0), x1, y0, y1 };
    drawChart();
  }
  function choose(i) {
    if (state.a === i) { state.a = state.b; state.b = null; }
    else if (state.b === i) state.b = null;
    else if (state.a === null) state.a = i;
    else if (state.b === null) state.b = i;
    else { state.a = state.b; state.b = i; }
    drawChart();
    drawPair();
    drawTails();
    drawTimeline();
  }

  // --- the tables ---

  function drawPair() {
    $("point-a").value = state.a === null ? "" : String(state.a);
    $("point-b").value = state.b === null ? "" : String(state.b);
    for (const line of document.querySelectorAll("#points tr[data-point]")) line.classList.toggle("chosen", [state.a, state.b].includes(Number(line.dataset.point)));
    Tables.pair($("pair-table"), points[state.a], points[state.b], state.statistic, statisticName(), currency);
  }

  function drawMatched() {
    const marks = plotted(X_AXES[0]);
    const lines = series.map((one, s) => ({ name: one.name, curve: state.shown[s] || s === state.baseline ? curve(marks, s) : null }));
    $("matched-text").textContent = `${state.y.name}, ${state.y.unit}, at the same ${statisticName()} interactivity; ratio to ${series[state.baseline].name}.`;
    Tables.matched($("matched-table"), lines, state.baseline, state.levels, (x) => { state.levels = state.levels.filter((v) => v !== x); drawMatched(); $("add-value").focus(); });
  }

  function drawPoints() {
    for (const label of document.querySelectorAll("#points .percentile")) label.textContent = statisticName();
    for (const line of document.querySelectorAll("#points tr.curve-name, #points tr.why")) line.hidden = !state.shown[Number(line.dataset.series)];
    for (const line of document.querySelectorAll("#points tr[data-point]")) {
      const p = points[Number(line.dataset.point)];
      line.hidden = !state.shown[Number(line.dataset.series)];
      for (const cell of line.querySelectorAll("[data-figure]")) {
        cell.textContent = cell.dataset.figure === "interactivity" ? rate(figure(p, "interactivity")) : time(figure(p, cell.dataset.figure));
      }
    }
  }

  // Latency by turn number of A and B, or of the busiest valid point of the baseline.
  function drawTails() {
    const candidates = [state.a, state.b].filter((i) => i !== null);
    const usual = series[state.baseline].points.filter((i) => points[i].validity.valid);
    const chosen = (candidates.length ? candidates : usual.slice(-1)).filter((i) => points[i].metrics.turns.length > 1);
    $("tails").hidden = !points.some((p) => p.metrics.turns.length > 1);
    const holder = $("tails-chart");
    holder.replaceChildren();
    if ($("tails").hidden) return;
    $("tails-text").textContent = chosen.length
      ? `By turn number: ${chosen.map((i) => `${i === state.b ? "B" : i === state.a ? "A" : ""} ${pointName(i)}`.trim()).join("; ")}.`
      : "The chosen points do not tell their turns apart.";
    if (!chosen.length) return;
    const bars = chosen.map((i) => ({ name: pointName(i), s: owner[i], faint: i === state.b && owner[i] === owner[chosen[0]], turns: points[i].metrics.turns }));
    for (const [name, field] of [["TTFT", "ttft_ms"], ["ITL", "itl_ms"], ["End to end", "e2e_ms"]]) Tails.draw(holder, bars, name, field, state.statistic, statisticName());
  }

  // The session of A, of B, or of the first point that has one.
  function drawTimeline() {
    const has = (i) => i !== null && (points[i].timeline !== null || points[i].server.length > 0);
    const i = [state.a, state.b, ...points.keys()].find(has);
    $("timeline").hidden = i === undefined;
    if (i === undefined) return;
    const letter = i === state.a ? "A: " : i === state.b ? "B: " : "";
    const { timeline } = points[i];
    $("timeline-text").textContent = letter + pointName(i) + (timeline ? `; session ${timeline.session}, ${timeline.requests.length} requests.` : ".");
    $("timeline").style.setProperty("--main", color(owner[i]));
    Timeline.draw($("timeline-chart"), points[i], owner[i]);
  }

  // --- export ---

  $("csv").addEventListener("click", () => Exports.csv(data, state.shown, currency));
  $("png").addEventListener("click", () => { if (frame) Exports.png(data, state.shown, frame.svg); });

  // --- controls ---

  function draw() { drawChart(); drawPair(); drawMatched(); drawPoints(); drawTails(); drawTimeline(); }
  function keys() {
    $("keys").replaceChildren(...series.map((one, s) => {
      const button = html("button", null, undefined, "key");
      button.type = "button";
      button.setAttribute("aria-pressed", String(state.shown[s]));
      const icon = node("svg", { width: 14, height: 14, viewBox: "0 0 14 14", "aria-hidden": "true" }, button);
      marker(shape(s), 7, 7, 5, { fill: color(s) }, icon);
      button.append(one.name);
      button.addEventListener("click", () => { state.shown[s] = !state.shown[s]; button.setAttribute("aria-pressed", String(state.shown[s])); state.view = null; draw(); });
      return button;
    }));
  }
  for (const [id, name] of STATISTICS) {
    const button = html("button", $("percentiles"), name);
    button.type = "button";
    button.setAttribute("aria-pressed", String(id === state.statistic));
    button.addEventListener("click", () => {
      state.statistic = id;
      state.view = null;
      for (const other of $("percentiles").children) other.setAttribute("aria-pressed", String(other === button));
      draw();
    });
  }
  const some = (axis) => points.some((p) => axis.of(p, state.statistic) > 0);
  $("x-axis").append(...X_AXES.filter(some).map((a) => new Option(a.name, a.id)));
  $("y-axis").append(...Y_AXES.filter(some).map((a) => new Option(`${a.name}, ${a.unit}`, a.id)));
  $("x-axis").addEventListener("change", () => { state.x = X_AXES.find((a) => a.id === $("x-axis").value); state.view = null; draw(); });
  $("y-axis").addEventListener("change", () => { state.y = Y_AXES.find((a) => a.id === $("y-axis").value); state.view = null; draw(); });
  $("baseline").append(...series.map((one, s) => new Option(one.name, s, s === state.baseline, s === state.baseline)));
  $("baseline").addEventListener("change", () => { state.baseline = Number($("baseline").value); drawMatched(); drawTails(); drawTimeline(); });
  for (const [id, key] of [["point-a", "a"], ["point-b", "b"]]) {
    $(id).append(new Option("choose a point", ""), ...series.flatMap((one) => one.points.map((i) => new Option(pointName(i), i))));
    $(id).addEventListener("change", () => { state[key] = $(id).value === "" ? null : Number($(id).value); drawChart(); drawPair(); drawTails(); drawTimeline(); });
  }
  $("add").addEventListener("submit", (event) => {
    event.preventDefault();
    const value = Number($("add-value").value);
    if (value > 0 && Number.isFinite(value)) { state.levels = [...new Set([...state.levels, value])]; $("add-value").value = ""; drawMatched(); }
  });
  $("log").addEventListener("click", () => { state.log = !state.log; state.view = null; $("log").setAttribute("aria-pressed", String(state.log)); drawChart(); });
  $("zoom-in").addEventListener("click", () => zoom(0.7));
  $("zoom-out").addEventListener("click", () => zoom(1 / 0.7));
  $("zoom-reset").addEventListener("click", () => { state.view = null; drawChart(); });
  for (const line of document.querySelectorAll("#points tr[data-point]")) line.addEventListener("click", () => choose(Number(line.dataset.point)));

  for (const id of ["controls", "frontier", "matched"]) $(id).hidden = false;
  $("pair").hidden = points.length < 2;
  // A first pair: the best point of the baseline and of the next configuration, so that the table shows what it does.
  const first = plotted().filter((m) => m.front);
  const of = (s) => first.filter((m) => m.s === s).sort((p, q) => q.y - p.y)[0];
  const rival = series.findIndex((_, s) => s !== state.baseline && of(s));
  if (of(state.baseline)) state.a = of(state.baseline).i;
  if (rival >= 0) state.b = of(rival).i;
  keys();
  draw();
  let drawn = $("chart").clientWidth;
  new ResizeObserver(() => {
    const now = $("chart").clientWidth;
    if (now !== drawn) { drawn = now; drawChart(); drawTails(); drawTimeline(); }
  }).observe($("chart"));
})();
