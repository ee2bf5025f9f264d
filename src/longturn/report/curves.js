"use strict";
// Frontiers and the monotone cubic through them: the same rules as bench/frontier.py, to which a test compares them.
const Curves = (() => {
  // Indices of the non-dominated points [x, y] by rising x. More y is better; more x too, unless lowerX.
  function nonDominated(points, lowerX) {
    const sign = lowerX ? -1 : 1;
    const order = points.map((_, i) => i).sort((a, b) => sign * (points[b][0] - points[a][0]) || points[b][1] - points[a][1] || a - b);
    const kept = [];
    let best = 0;
    for (const i of order) {
      if (points[i][1] > best) { kept.push(i); best = points[i][1]; }
    }
    return lowerX ? kept : kept.reverse();
  }

  // points: [x, y] by rising x. Steffen's tangents inside, no curvature at the ends.
  function steffen(points) {
    const n = points.length;
    const h = [];
    const s = [];
    for (let i = 0; i + 1 < n; i++) {
      h.push(points[i + 1][0] - points[i][0]);
      s.push((points[i + 1][1] - points[i][1]) / h[i]);
    }
    const m = new Array(n).fill(0);
    for (let i = 1; i + 1 < n; i++) {
      const p = (s[i - 1] * h[i] + s[i] * h[i - 1]) / (h[i - 1] + h[i]);
      m[i] = (Math.sign(s[i - 1]) + Math.sign(s[i])) * Math.min(Math.abs(s[i - 1]), Math.abs(s[i]), Math.abs(p) / 2);
    }
    if (n === 2) m[0] = m[1] = s[0];
    if (n > 2) { m[0] = (3 * s[0] - m[1]) / 2; m[n - 1] = (3 * s[n - 2] - m[n - 2]) / 2; }

    // {value, place}: place is "inside", "below" or "above" the range; outside it the value is the edge's.
    function at(x) {
      if (x < points[0][0]) return { value: points[0][1], place: "below" };
      if (x > points[n - 1][0]) return { value: points[n - 1][1], place: "above" };
      let i = 0;
      while (i + 2 < n && x >= points[i + 1][0]) i++;
      if (n === 1) return { value: points[0][1], place: "inside" };
      const t = (x - points[i][0]) / h[i];
      const rise = points[i + 1][1] - points[i][1];
      const a = m[i] * h[i];
      const b = m[i + 1] * h[i];
      return { value: points[i][1] + t * (a + t * (3 * rise - 2 * a - b + t * (a + b - 2 * rise))), place: "inside" };
    }
    return { points, at };
  }
  return { nonDominated, steffen };
})();
