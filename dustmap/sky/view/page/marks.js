// What is drawn under and over the dust: the box with its axes in pc, the Sun, directions, points.

/** Round numbers within [low, high], about `most` of them. */
function ticksIn(low, high, most) {
  const rough = (high - low) / most;
  const decade = 10 ** Math.floor(Math.log10(rough));
  const step = decade * [1, 2, 5, 10].find((size) => size * decade >= rough);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-6); i * step <= high + 1e-6 * step; i += 1) ticks.push(i * step);
  return ticks.map((tick) => Number(tick.toPrecision(10)));
}

/** A number with a minus sign, not a hyphen. */
function plain(value) {
  return String(Number(value.toPrecision(6))).replace("-", "−");
}

/** Colours and fonts of the page, as the theme has them. */
function lookOf() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(name).trim();
  return { paper: get("--paper"), panel: get("--panel"), ink: get("--ink"), muted: get("--muted"), line: get("--line"), accent: get("--accent"), sun: "#ffd84d", font: getComputedStyle(document.body).fontFamily };
}

/** A canvas of so many pixels of the page, cleared, in their units. */
function cleared(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

/** A corner of the box, by 0 or 1 on each axis. */
function corner(sides) {
  return sides.map((side, axis) => about.box[side][axis]);
}

function line(pen, camera, from, to) {
  const [a, b] = [projected(camera, from), projected(camera, to)];
  if (!a || !b) return null;
  pen.beginPath();
  pen.moveTo(a.x, a.y);
  pen.lineTo(b.x, b.y);
  pen.stroke();
  return [a, b];
}

/** Which faces of the box look away from the eye: 0, 1 or null, by axis; null where neither does. */
function backSides(camera) {
  return AXES.map((_, axis) => (camera.eye[axis] > about.box[1][axis] ? 0 : camera.eye[axis] < about.box[0][axis] ? 1 : null));
}

/** The far walls of the box, with lines at the ticks. */
function drawUnder(pen, camera, look) {
  pen.lineWidth = 1;
  pen.strokeStyle = look.line;
  const back = backSides(camera);
  back.forEach((side, axis) => {
    if (side === null) return;
    AXES.forEach((_, across) => {
      if (across === axis) return;
      const other = 3 - axis - across;
      const [low, high] = [about.box[0][across], about.box[1][across]];
      const apart = boxTicks(camera)[across].filter((tick) => Math.min(tick - low, high - tick) > 0.04 * (high - low));
      for (const tick of [...apart, low, high]) {
        const [from, to] = [corner([0, 0, 0]), corner([1, 1, 1])];
        from[axis] = to[axis] = about.box[side][axis];
        from[across] = to[across] = tick;
        from[other] = about.box[0][other];
        line(pen, camera, from, to);
      }
    });
  });
}

/** Ticks of the three axes, fewer where they are short on the screen. */
function boxTicks(camera) {
  const scale = camera.height / (2 * camera.tangent[1] * camera.distance);
  return AXES.map((_, axis) => {
    const [low, high] = [about.box[0][axis], about.box[1][axis]];
    return ticksIn(low, high, Math.min(6, Math.max(2, ((high - low) * scale) / 62)));
  });
}

/** The edge along an axis that carries its labels: of those on the outline, the lowest or leftmost. */
function labelledEdge(camera, axis) {
  const others = [0, 1, 2].filter((other) => other !== axis);
  const back = backSides(camera);
  const edges = [];
  for (const one of [0, 1]) {
    for (const two of [0, 1]) {
      const sides = [0, 0, 0];
      [sides[others[0]], sides[others[1]]] = [one, two];
      const behind = others.filter((other) => back[other] === sides[other]).length;
      const [from, to] = [corner(sides), corner(sides)];
      from[axis] = about.box[0][axis];
      to[axis] = about.box[1][axis];
      const ends = [projected(camera, from), projected(camera, to)];
      const outlined = behind === 1 || others.some((other) => back[other] === null);
      if (ends[0] && ends[1] && outlined) edges.push({ from, to, ends });
    }
  }
  const left = (edge) => -(edge.ends[0].x + edge.ends[1].x);
  const height = (edge) => (axis === 2 ? left(edge) : edge.ends[0].y + edge.ends[1].y + 0.01 * left(edge));
  return edges.sort((a, b) => height(b) - height(a))[0];
}

/** Texts that keep clear of each other: what comes first is written, what would cover it is not. */
function makeWriter(pen, look, width, height) {
  const taken = [];
  pen.lineJoin = "round";
  pen.textBaseline = "middle";
  return {
    keep: (box) => taken.push(box),
    write(text, x, y, { align = "left", colour = look.ink, size = 12, weight = "", must = false } = {}) {
      pen.font = `${weight} ${size}px ${look.font}`;
      const wide = pen.measureText(text).width;
      const left = align === "left" ? x : align === "right" ? x - wide : x - 0.5 * wide;
      const box = [left - 2, y - 0.6 * size, left + wide + 2, y + 0.6 * size];
      const covers = taken.some((other) => box[0] < other[2] && box[2] > other[0] && box[1] < other[3] && box[3] > other[1]);
      const beyond = box[0] < 0 || box[2] > width || box[1] < 0 || box[3] > height;
      if ((covers || beyond) && !must) return false;
      taken.push(box);
      pen.textAlign = "left";
      pen.lineWidth = 3;
      pen.strokeStyle = look.paper;
      pen.strokeText(text, left, y);
      pen.fillStyle = colour;
      pen.fillText(text, left, y);
      return true;
    },
  };
}

/** Near edges, ticks and their numbers, and the names of the axes. */
function drawAxes(pen, camera, look, writer) {
  const middle = projected(camera, CENTRE);
  const ticks = boxTicks(camera);
  AXES.forEach((name, axis) => {
    const edge = labelledEdge(camera, axis);
    if (!edge || !middle) return;
    pen.lineWidth = 1;
    pen.strokeStyle = look.muted;
    const [a, b] = line(pen, camera, edge.from, edge.to);
    const length = Math.hypot(b.x - a.x, b.y - a.y);
    if (length < 60) return;
    // Across the edge, away from the middle of the box.
    let out = [(a.y - b.y) / length, (b.x - a.x) / length];
    const off = [(a.x + b.x) / 2 - middle.x, (a.y + b.y) / 2 - middle.y];
    if (out[0] * off[0] + out[1] * off[1] < 0) out = out.map((x) => -x);
    const align = Math.abs(out[0]) < 0.45 ? "center" : out[0] > 0 ? "left" : "right";
    writer.write(`${name} [pc]`, (a.x + b.x) / 2 + 42 * out[0], (a.y + b.y) / 2 + 34 * out[1], { align, weight: "600" });
    for (const tick of ticks[axis]) {
      const place = [...edge.from];
      place[axis] = tick;
      const at = projected(camera, place);
      if (!at) continue;
      pen.strokeStyle = look.muted;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(at.x, at.y);
      pen.lineTo(at.x + 4 * out[0], at.y + 4 * out[1]);
      pen.stroke();
      writer.write(plain(tick), at.x + 8 * out[0], at.y + 14 * out[1], { align, colour: look.muted, size: 11 });
    }
  });
}

/** A ring with a dot, ☉. */
function drawSun(pen, look, x, y, radius) {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fillStyle = look.sun;
  pen.fill();
  pen.lineWidth = 1.4;
  pen.strokeStyle = "#1b1e22";
  pen.stroke();
  pen.beginPath();
  pen.arc(x, y, 1.4, 0, 2 * Math.PI);
  pen.fillStyle = "#1b1e22";
  pen.fill();
}

/** An arrow between two pixels. */
function drawArrow(pen, a, b, colour, halo) {
  const length = Math.hypot(b.x - a.x, b.y - a.y);
  if (length < 9) return;
  const [ux, uy] = [(b.x - a.x) / length, (b.y - a.y) / length];
  for (const [style, width] of [[halo, 4], [colour, 1.7]]) {
    pen.strokeStyle = style;
    pen.lineWidth = width;
    pen.beginPath();
    pen.moveTo(a.x, a.y);
    pen.lineTo(b.x, b.y);
    pen.moveTo(b.x - 8 * ux + 4 * uy, b.y - 8 * uy - 4 * ux);
    pen.lineTo(b.x, b.y);
    pen.lineTo(b.x - 8 * ux - 4 * uy, b.y - 8 * uy + 4 * ux);
    pen.stroke();
  }
}

/** The Sun, and arrows from it to the Galactic centre, to l = 90° and to b = 90°. */
function drawDirections(pen, camera, look, writer) {
  const base = inBox([0, 0, 0]) ? [0, 0, 0] : CENTRE;
  const from = projected(camera, base);
  if (!from) return;
  // As long on the screen whatever the distance; what points at the eye is short.
  const length = 0.16 * Math.min(camera.tangent[0], camera.tangent[1]) * 2 * from.depth;
  const shafts = [];
  ["Galactic centre", "l = 90°", "b = 90°"].forEach((name, axis) => {
    const direction = [0, 0, 0];
    direction[axis] = 1;
    const to = projected(camera, along(base, direction, length * (axis === 0 ? 1 : 0.72)));
    if (!to) return;
    drawArrow(pen, from, to, look.ink, look.paper);
    for (const part of [0.3, 0.5, 0.7]) shafts.push([from.x + part * (to.x - from.x), from.y + part * (to.y - from.y)]);
    const far = Math.hypot(to.x - from.x, to.y - from.y);
    if (far < 24) return;
    const [ux, uy] = [(to.x - from.x) / far, (to.y - from.y) / far];
    const align = Math.abs(ux) < 0.4 ? "center" : ux > 0 ? "left" : "right";
    const places = [[5 * ux, 11 * uy, align], [0, -14, "center"], [0, 16, "center"], [-40 * ux, 16, "center"]];
    places.some(([dx, dy, side]) => writer.write(name, to.x + dx, to.y + dy, { align: side, weight: "600", size: 11.5 }));
  });
  for (const [x, y] of shafts) writer.keep([x - 5, y - 5, x + 5, y + 5]);
  const sun = projected(camera, [0, 0, 0]);
  if (!sun) return;
  drawSun(pen, look, sun.x, sun.y, 5.5);
  for (const [dx, dy, align] of [[-9, 11, "right"], [9, 11, "left"], [-9, -11, "right"], [9, -11, "left"]]) {
    if (writer.write("Sun", sun.x + dx, sun.y + dy, { align, weight: "600" })) return;
  }
}

/** Points, and what was picked; returns those in view, the near ones first. */
function drawPoints(pen, camera, look, now) {
  const seen = points.map((point) => ({ ...point, at: projected(camera, point.place) })).filter((point) => point.at);
  seen.sort((a, b) => a.at.depth - b.at.depth);
  pen.lineWidth = 1.2;
  for (const { at } of seen) {
    pen.beginPath();
    pen.arc(at.x, at.y, seen.length > 300 ? 1.5 : 3, 0, 2 * Math.PI);
    pen.fillStyle = look.accent;
    pen.fill();
    pen.strokeStyle = look.paper;
    pen.stroke();
  }
  const picked = now.picked && projected(camera, now.picked);
  for (const [style, width] of picked ? [[look.paper, 4], [look.ink, 1.6]] : []) {
    pen.strokeStyle = style;
    pen.lineWidth = width;
    pen.beginPath();
    pen.arc(picked.x, picked.y, 7, 0, 2 * Math.PI);
    for (const [dx, dy] of [[1, 0], [-1, 0], [0, 1], [0, -1]]) {
      pen.moveTo(picked.x + 4 * dx, picked.y + 4 * dy);
      pen.lineTo(picked.x + 12 * dx, picked.y + 12 * dy);
    }
    pen.stroke();
  }
  return seen;
}

/** Names beside their points, where there is room; of several points of a name beside the nearest. */
function drawNames(seen, writer) {
  const written = new Set([""]);
  for (const { at, name } of seen) {
    if (written.has(name)) continue;
    written.add(name);
    for (const [dx, dy, align] of [[7, 0, "left"], [0, -15, "center"], [0, 15, "center"], [-7, 0, "right"]]) {
      if (writer.write(name, at.x + dx, at.y + dy, { align, size: 11.5 })) break;
    }
  }
}
