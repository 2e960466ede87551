// The slice drawn flat, with axes and the scale of its colours; and the scale beside the dust.

/** 256 colours as RGBA bytes; on light paper from light to dark, as dust is dark. */
const tables = new Map();
function tableOf(now, dark) {
  // Uncertainties never have the colours of densities.
  const name = now.show !== "spread" ? now.colours : now.colours === "cividis" ? "magma" : "cividis";
  const key = `${name} ${dark}`;
  if (!tables.has(key)) {
    const digitsOf = about.colours[name];
    const table = new Uint8Array(1024);
    for (let i = 0; i < 256; i += 1) {
      const from = 6 * (dark ? i : 255 - i);
      for (let k = 0; k < 3; k += 1) table[4 * i + k] = parseInt(digitsOf.slice(from + 2 * k, from + 2 * k + 2), 16);
      table[4 * i + 3] = 255;
    }
    tables.set(key, table);
  }
  return tables.get(key);
}

/** Red, green and blue, 0 to 1, of a colour such as #0e1116. */
function partsOf(colour) {
  return [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16) / 255);
}

/** Numbers on a scale, `most` at most: as many round ones of each decade as there is room for. */
function scaleTicks(scale, factor, most) {
  const [low, high] = scale.ends.map((value) => value * factor);
  if (!about.positive) return ticksIn(low, high, most).map((tick) => tick / factor);
  const rounds = [[1, 1.5, 2, 3, 4, 5, 7], [1, 2, 5], [1, 3], [1]].map((sizes) => {
    const ticks = [];
    for (let decade = Math.floor(Math.log10(low)); decade <= Math.log10(high); decade += 1) ticks.push(...sizes.map((size) => size * 10 ** decade));
    return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  });
  return (rounds.find((ticks) => ticks.length <= most) ?? rounds[3]).map((tick) => tick / factor);
}

/** Whether what is shown is relative, and by which factor its numbers are multiplied. */
function unitsOf(now) {
  if (now.show === "spread" && about.positive) return { factor: 1, label: "σ / ρ" };
  const symbol = now.show === "spread" ? "σ" : "ρ";
  return { factor: PER_MILLE, label: `${symbol} in ${about.system} [10⁻³ ${about.unit}/pc]` };
}

/** The scale of the colours with its numbers below, and a mark at the threshold. */
function drawScale(pen, now, look, writer, x, y, width, table) {
  const scale = shownScale(now);
  const { factor, label } = unitsOf(now);
  writer.keep([x - 12, y - 22, x + width + 12, y + 32]);
  for (let i = 0; i < width; i += 1) {
    const from = 4 * Math.min(255, Math.floor((256 * i) / width));
    pen.fillStyle = `rgb(${table[from]} ${table[from + 1]} ${table[from + 2]})`;
    pen.fillRect(x + i, y, 1.5, 11);
  }
  pen.strokeStyle = look.muted;
  pen.lineWidth = 1;
  pen.strokeRect(x - 0.5, y - 0.5, width + 1, 12);
  const text = { colour: look.ink, must: true, size: 12 };
  writer.write(label, x, y - 11, { ...text, weight: "600" });
  for (const tick of scaleTicks(scale, factor, width / 34)) {
    const at = x + width * Math.min(Math.max(scale.part(tick), 0), 1);
    pen.strokeStyle = look.ink;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(at, y + 11);
    pen.lineTo(at, y + 15);
    pen.stroke();
    writer.write(plain(tick * factor), at, y + 23, { ...text, align: "center", size: 11 });
  }
  if (now.show === "spread") return;
  const at = x + width * now.threshold;
  pen.beginPath();
  pen.moveTo(at, y + 3);
  pen.lineTo(at - 5, y - 5);
  pen.lineTo(at + 5, y - 5);
  pen.closePath();
  pen.fillStyle = look.ink;
  pen.fill();
}

/** Axes of the flat slice: to the right, and up. */
function axesOfSlice(axis) {
  return [0, 1, 2].filter((other) => other !== axis);
}

/** Where the image of the slice is on its canvas, and how to get from pixels to pc. */
function frameOf(now, width) {
  const [right, up] = axesOfSlice(now.flat);
  const span = [right, up].map((axis) => about.box[1][axis] - about.box[0][axis]);
  const [left, top, below] = [46, 20, 38];
  let wide = width - left - 8;
  let high = (wide * span[1]) / span[0];
  if (high > 300) [wide, high] = [(wide * 300) / high, 300];
  const x = (place) => left + (wide * (place[right] - about.box[0][right])) / span[0];
  const y = (place) => top + (high * (about.box[1][up] - place[up])) / span[1];
  const placeAt = (px, py) => {
    const place = [...now.levels];
    place[right] = about.box[0][right] + ((px - left) / wide) * span[0];
    place[up] = about.box[1][up] - ((py - top) / high) * span[1];
    return inBox(place) ? place : null;
  };
  return { left, top, wide, high, below, height: top + high + below, right, up, x, y, placeAt };
}

/** 0 where the prior dominates, 1 where the data do, between them in a narrow range of coverage. */
function knownPart(coverage) {
  const part = Math.min(Math.max((coverage - about.dominated + 0.1) / 0.2, 0), 1) || 0;
  return part * part * (3 - 2 * part);
}

/** The image of the slice. */
function imageOf(now, frame, table, paper) {
  const volume = shownVolume(now);
  const coverage = now.fade ? volumes.get("coverage") : undefined;
  const scale = shownScale(now);
  const [w, h] = [Math.max(2, Math.round(frame.wide)), Math.max(2, Math.round(frame.high))];
  const image = new ImageData(w, h);
  for (let j = 0; j < h; j += 1) {
    for (let i = 0; i < w; i += 1) {
      const place = frame.placeAt(frame.left + ((i + 0.5) * frame.wide) / w, frame.top + ((j + 0.5) * frame.high) / h);
      const value = place ? volume.at(place) : NaN;
      if (Number.isNaN(value)) continue;
      const from = 4 * Math.min(255, Math.max(0, Math.floor(256 * scale.part(value)) || 0));
      const sure = coverage ? 0.32 + 0.68 * knownPart(coverage.at(place)) : 1;
      const to = 4 * (j * w + i);
      for (let k = 0; k < 3; k += 1) image.data[to + k] = sure * table[from + k] + (1 - sure) * 255 * paper[k];
      image.data[to + 3] = 255;
    }
  }
  return image;
}

/** Draw the slice with its axes; returns its frame. */
function drawSlice(canvas, now, look, table) {
  const width = canvas.clientWidth || 290;
  const frame = frameOf(now, width);
  canvas.style.height = `${frame.height}px`;
  const pen = cleared(canvas, width, frame.height);
  const writer = makeWriter(pen, { ...look, paper: look.panel }, width, frame.height);
  const image = imageOf(now, frame, table, partsOf(look.panel));
  const part = document.createElement("canvas");
  [part.width, part.height] = [image.width, image.height];
  part.getContext("2d").putImageData(image, 0, 0);
  pen.drawImage(part, frame.left, frame.top, frame.wide, frame.high);
  pen.strokeStyle = look.muted;
  pen.lineWidth = 1;
  pen.strokeRect(frame.left - 0.5, frame.top - 0.5, frame.wide + 1, frame.high + 1);
  const level = plain(Math.round(10 * now.levels[now.flat]) / 10);
  const shown = { mean: "mean", spread: about.positive ? "relative uncertainty" : "uncertainty", sample: `sample ${now.sample}` }[now.show];
  writer.write(`${AXES[now.flat]} = ${level} pc, ${shown}`, frame.left, 9, { weight: "600", must: true });
  drawFlatTicks(pen, frame, look, writer);
  drawFlatMarks(pen, frame, look, now);
  return frame;
}

function drawFlatTicks(pen, frame, look, writer) {
  const bottom = frame.top + frame.high;
  for (const tick of ticksIn(about.box[0][frame.right], about.box[1][frame.right], frame.wide / 52)) {
    const at = frame.x({ [frame.right]: tick });
    pen.fillStyle = look.muted;
    pen.fillRect(at - 0.5, bottom, 1, 4);
    writer.write(plain(tick), at, bottom + 11, { align: "center", colour: look.muted, size: 11 });
  }
  for (const tick of ticksIn(about.box[0][frame.up], about.box[1][frame.up], Math.max(2, frame.high / 40))) {
    const at = frame.y({ [frame.up]: tick });
    pen.fillStyle = look.muted;
    pen.fillRect(frame.left - 4, at - 0.5, 4, 1);
    writer.write(plain(tick), frame.left - 7, at, { align: "right", colour: look.muted, size: 11 });
  }
  const centre = frame.right === 0 ? " → Galactic centre" : "";
  writer.write(`${AXES[frame.right]} [pc]${centre}`, frame.left + 0.5 * frame.wide, bottom + 27, { align: "center", must: true });
  pen.save();
  pen.translate(8, frame.top + 0.5 * frame.high);
  pen.rotate(-Math.PI / 2);
  pen.fillStyle = look.ink;
  pen.font = `12px ${look.font}`;
  pen.textAlign = "center";
  pen.fillText(`${AXES[frame.up]} [pc]`, 0, 0);
  pen.restore();
}

/** The Sun, points near the slice, and what was picked. */
function drawFlatMarks(pen, frame, look, now) {
  pen.save();
  pen.beginPath();
  pen.rect(frame.left, frame.top, frame.wide, frame.high);
  pen.clip();
  const near = 2 * volumes.get("mean").spacing[now.flat];
  for (const { place } of points.filter((point) => Math.abs(point.place[now.flat] - now.levels[now.flat]) <= near)) {
    pen.beginPath();
    pen.arc(frame.x(place), frame.y(place), 2.5, 0, 2 * Math.PI);
    pen.fillStyle = look.accent;
    pen.fill();
    pen.lineWidth = 1;
    pen.strokeStyle = look.paper;
    pen.stroke();
  }
  if (now.picked) {
    pen.strokeStyle = look.ink;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.arc(frame.x(now.picked), frame.y(now.picked), 6, 0, 2 * Math.PI);
    pen.stroke();
  }
  drawSun(pen, look, frame.x([0, 0, 0]), frame.y([0, 0, 0]), 4.5);
  pen.restore();
}
