// Two points side by side, and curves at matched interactivity.
const Tables = (() => {
  const { NONE, compact, time, rate, percent, times, html, ticks } = Draw;
  const { figure, perMoney, perJoule } = Figures;
  const known = (v) => v !== null && v !== undefined;

  // cells: text, or {text, className}; the first is the row's heading.
  function row(table, cells, tag = "td") {
    const line = html("tr", table);
    cells.forEach((cell, k) => {
      const made = html(k ? tag : "th", line, typeof cell === "object" ? cell.text : cell, typeof cell === "object" ? cell.className : undefined);
      if (!k || tag === "th") made.scope = tag === "th" ? "col" : "row";
      if (!k && tag === "th") made.className = "left";
    });
    return line;
  }

  // [name, value, its text, 1 where more is better and -1 where less is]
  function figures(statistic, label, currency) {
    const cost = (p) => { const per = p.platform.currency === currency ? perMoney(p) : null; return per ? 1e6 / per : null; };
    const latency = (name, field) => [`${name} ${label}`, (p) => figure(p, field, statistic), time, -1];
    return [
      [`Interactivity ${label}, tok/s`, (p) => figure(p, "interactivity", statistic), rate, 1],
      latency("TTFT", "ttft_ms"), latency("ITL", "itl_ms"), latency("End to end", "e2e_ms"), latency("Job time", "jobs"),
      ["Total tok/s per chip", (p) => p.metrics.total_tokens_per_s, rate, 1],
      ["Output tok/s per chip", (p) => p.metrics.output_tokens_per_s, rate, 1],
      ["Jobs per hour and chip", (p) => p.metrics.jobs && p.metrics.jobs.per_hour_per_chip, rate, 1],
      [`${currency} per million tokens`, cost, (v) => v.toPrecision(3), -1],
      ["Tokens per joule", perJoule, (v) => String(+v.toPrecision(3)), 1],
      ["Cache hits", (p) => p.metrics.hit_rate, percent, 1],
    ];
  }

  function pair(holder, a, b, statistic, label, currency) {
    holder.replaceChildren();
    if (!a || !b) { html("p", holder, "Two points give a ratio of each figure.", "empty"); return; }
    const table = html("table", holder);
    row(html("thead", table), ["", "A", "B", "B ÷ A"], "th");
    const body = html("tbody", table);
    for (const [name, of, show, sign] of figures(statistic, label, currency)) {
      const [va, vb] = [of(a), of(b)];
      if (!known(va) && !known(vb)) continue;
      const both = va > 0 && vb > 0;
      const change = both ? (vb / va - 1) * sign : 0;
      const better = Math.abs(change) < 0.005 ? 0 : change;
      const cell = (v, wins) => ({ text: known(v) ? show(v) : NONE, className: wins ? "gain" : "" });
      row(body, [name, cell(va, better < 0), cell(vb, better > 0), both ? times(vb / va) : NONE]);
    }
    for (const [letter, p] of [["A", a], ["B", b]]) {
      if (!p.validity.valid) html("p", holder, `${letter} is invalid: ${p.validity.reasons.join("; ")}.`, "warning");
    }
  }

  function levels(curves, added) {
    const low = Math.min(...curves.map((c) => c.points[0][0]));
    const high = Math.max(...curves.map((c) => c.points[c.points.length - 1][0]));
    const nice = high > low ? ticks(low, high, 11) : [low];
    // A curve of one point has a figure there and nowhere else.
    const single = curves.filter((c) => c.points.length === 1).map((c) => c.points[0][0]);
    return [...new Set([...nice, ...single, ...added])].sort((a, b) => a - b);
  }

  // lines: [{name, curve}], curve null where there is none; added: the reader's own levels, which can be removed.
  function matched(holder, lines, baseline, added, remove) {
    holder.replaceChildren();
    const base = lines[baseline].curve;
    const others = lines.filter((line, s) => s !== baseline && line.curve);
    if (!base && !others.length) { html("p", holder, "No valid point has both of these figures.", "empty"); return; }
    const table = html("table", holder);
    row(html("thead", table), ["tok/s per user", lines[baseline].name, ...others.flatMap((line) => [line.name, "ratio"])], "th");
    const body = html("tbody", table);
    const cell = (value) => {
      if (!value) return NONE;
      if (value.place === "above") return { text: "not reached", className: "none" };
      return value.place === "below" ? { text: "≥ " + compact(value.value), className: "dim" } : compact(value.value);
    };
    for (const x of levels(lines.map((line) => line.curve).filter(Boolean), added)) {
      const reference = base && base.at(x);
      const cells = [compact(x), cell(reference)];
      for (const { curve } of others) {
        const value = curve.at(x);
        // A ratio outside either range would compare a measurement with none.
        const both = reference && reference.place === "inside" && value.place === "inside";
        cells.push(cell(value), both ? { text: times(value.value / reference.value), className: value.value >= reference.value ? "gain" : "loss" } : NONE);
      }
      const line = row(body, cells);
      if (!added.includes(x)) continue;
      const button = html("button", line.firstChild, "×", "remove");
      button.type = "button";
      button.setAttribute("aria-label", `Remove ${compact(x)} tok/s`);
      button.addEventListener("click", () => remove(x));
    }
  }
  return { pair, matched };
})();
