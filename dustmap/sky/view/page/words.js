// Numbers and sentences of the page, beside the pictures.

const find = (id) => document.getElementById(id);

/** Round to three digits, without powers of ten. */
function round(value) {
  return plain(Number(value.toPrecision(3)));
}

/** Value ± error, to the same decimal place: two digits of the error. */
function withError(value, error) {
  if (!Number.isFinite(value)) return "none";
  if (!Number.isFinite(error) || error <= 0) return round(value);
  const decimals = Math.min(6, Math.max(0, 1 - Math.floor(Math.log10(error))));
  return `${value.toFixed(decimals)} ± ${error.toFixed(decimals)}`.replaceAll("-", "−");
}

/** A density, with its error if there is one, in thousandths. */
function counted(density, std) {
  const text = withError(density * PER_MILLE, std * PER_MILLE);
  return `${text.includes("±") ? `(${text})` : text} × 10⁻³ ${about.unit}/pc`;
}

/** Parts of a text in which the name of the system, such as A_V, has its index below the line. */
function subscripted(text) {
  const [letter, index] = /^[A-Za-z]_\w+$/.test(about.system) ? about.system.split("_") : [about.system, ""];
  return text.split(about.system).flatMap((part, i) => {
    if (i === 0) return [part];
    const below = document.createElement("sub");
    below.textContent = index;
    return [letter, below, part];
  });
}

/** The table of numbers at the place that was picked. */
function showPicked() {
  find("picked").hidden = !state.picked;
  if (!state.picked) return;
  const at = numbersAt(state.picked);
  const rows = [
    ["l, b", `${at.l.toFixed(1)}°, ${plain(Number(at.b.toFixed(1)))}°`],
    ["distance", `${plain(Number(at.distance.toFixed(1)))} pc`],
    ["X, Y, Z", `${at.place.map((x) => plain(Number(x.toFixed(1)))).join(", ")} pc`],
    ["ρ", counted(at.density, at.std)],
    [`${about.system}(<d)`, `${withError(at.column, at.columnStd)} ${about.unit}${at.sunOutside ? ", of what is in the box" : ""}`],
  ];
  if (state.show === "sample") rows.splice(4, 0, ["this sample", counted(shownVolume(state).at(state.picked))]);
  if (at.drawn > 1) rows.push(["", `± from ${at.drawn} samples`]);
  if (Number.isFinite(at.coverage)) rows.push(["coverage", `${at.coverage.toFixed(2)}: ${at.coverage > about.dominated ? "the data decide" : "the prior dominates"}`]);
  find("picked").querySelector("tbody").replaceChildren(...rows.map(([name, value]) => {
    const row = document.createElement("tr");
    const [head, cell] = [document.createElement("th"), document.createElement("td")];
    head.append(...subscripted(name));
    cell.append(...subscripted(value));
    head.scope = "row";
    row.append(head, cell);
    return row;
  }));
}

/** What the page says of the map, and of its own precision. */
function showFacts() {
  const steps = about.grid.spacing;
  const spacing = new Set(steps).size > 1 ? steps.join(" × ") : steps[0];
  find("facts").replaceChildren(...subscripted(`${about.system}, ${about.grid.shape.join(" × ")} voxels of ${spacing} pc`));
  const percent = (value) => `${(100 * value).toPrecision(2)}\u00a0%`;
  const mean = volumes.get("mean");
  const error = about.positive ? percent(mean.error) : counted(mean.error);
  const notes = [
    "Click the dust or a slice for the numbers there; ? lists the keys.",
    about.coarsened && `Coarser than the map: ${about.coarsened}.`,
    `Densities of this page are rounded by at most ${error}, and those beyond four decades are at the end of these; dustmap query has them in full. The ± of ρ is that of the voxels around a place: between their centres it is another, which dustmap query knows.`,
    samples.some((volume) => volume.factor > 1) && "Averaged samples vary less than the map's: standard deviations of integrals are too small by as much.",
    samples.length && `${samples.length} of the map's ${about.grid.samples} posterior samples; standard deviations from so few have a standard error of some ${Math.round(100 / Math.sqrt(samples.length))}\u00a0%, more where the density is uncertain.`,
    points.length < about.points.length && `${about.points.length - points.length} of ${about.points.length} points lie outside the map and are not drawn.`,
    volumes.get("coverage") && `Coverage, the share of the prior's variance that the data removed, is below ${about.dominated} where the prior dominates.`,
    "X points to the Galactic centre, Y to l = 90°, Z to b = 90°.",
    [`dustmap ${about.version}`, ...about.history].join(" · "),
  ];
  find("notes").replaceChildren(...notes.filter(Boolean).map((text) => {
    const paragraph = document.createElement("p");
    paragraph.textContent = text;
    return paragraph;
  }));
  find("spread-name").textContent = about.positive ? "Uncertainty σ/ρ" : "Uncertainty σ";
  for (const input of document.getElementsByName("show")) {
    input.disabled = !(input.value === "sample" ? samples.length : volumes.has(input.value));
  }
  find("samples").hidden = samples.length === 0;
  find("fade-row").hidden = !volumes.has("coverage");
  find("names-row").hidden = points.length === 0;
  find("colours").replaceChildren(...Object.keys(about.colours).map((name) => new Option(name, name)));
  AXES.forEach((_, axis) => {
    const slider = find(`level-${axis}`);
    [slider.min, slider.max] = [about.box[0][axis], about.box[1][axis]];
    slider.step = mean.spacing[axis] / 4;
  });
}
