// The controls, the keyboard and the mouse; every change of the state draws the page again.

const find = (id) => document.getElementById(id);
const scene = find("scene");
const canvases = { under: find("under"), volume: find("volume"), over: find("over") };
const darkSystem = window.matchMedia("(prefers-color-scheme: dark)");
let painter = null;
let frame = null;
let scheduled = 0;
let settling = 0;
let playing = 0;
let lastAxis = 2;
// Part of the pixels that are drawn while the camera moves, such that it moves smoothly.
let coarseness = 0.5;

function isDark() {
  return state.theme === "dark" || (state.theme === "auto" && darkSystem.matches);
}

/** Draw all there is; moving: fewer rays, until the camera rests. */
function draw(moving) {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  const [width, height] = [scene.clientWidth, scene.clientHeight];
  const look = lookOf();
  const table = tableOf(state, isDark());
  const camera = cameraOf(state, width, height);
  const share = (moving ? coarseness : 1) * (moving ? 1 : Math.min(window.devicePixelRatio || 1, 2));
  const size = [width, height].map((length) => Math.max(1, Math.round(length * share)));
  if (canvases.volume.width !== size[0] || canvases.volume.height !== size[1]) [canvases.volume.width, canvases.volume.height] = size;
  const spent = painter.draw(state, camera, table, partsOf(look.paper), moving);
  if (moving) coarseness = Math.min(1, Math.max(0.2, coarseness * Math.sqrt(Math.min(2, Math.max(0.5, 33 / spent)))));
  drawUnder(cleared(canvases.under, width, height), camera, look);
  const pen = cleared(canvases.over, width, height);
  const writer = makeWriter(pen, look, width, height);
  drawScale(pen, state, look, writer, 20, height - 42, Math.min(250, width - 60), table);
  drawDirections(pen, camera, look, writer);
  drawAxes(pen, camera, look, writer);
  drawPoints(pen, camera, look, writer, state);
  if (!moving) frame = drawSlice(find("slice"), state, look, table);
}

/** Draw at the next frame; after a movement once more, in full. */
function schedule(moving = false) {
  clearTimeout(settling);
  if (moving) settling = setTimeout(() => schedule(), 180);
  if (scheduled) return;
  scheduled = requestAnimationFrame(() => {
    scheduled = 0;
    draw(moving);
  });
}

/** Change the state, the controls and the address, and draw. */
async function change(part, moving = false) {
  state = { ...state, ...part };
  const needed = [opaqueVolume(state), shownVolume(state)];
  if (needed.some((volume) => !volume.codes)) await Promise.all(needed.map((volume) => volume.load()));
  showControls();
  clearTimeout(change.saving);
  change.saving = setTimeout(saveFragment, 150);
  schedule(moving);
}

/** Keep the view in the address; a page inside another may not have one. */
function saveFragment() {
  const fragment = fragmentOf(state);
  try {
    history.replaceState(null, "", fragment ? `#${fragment}` : "#");
  } catch {
    // The frame of a notebook has no address of its own.
  }
}

function say(words) {
  find("message").textContent = words;
  clearTimeout(say.silence);
  say.silence = setTimeout(() => { find("message").textContent = ""; }, 4000);
}

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

function showControls() {
  for (const input of document.getElementsByName("show")) input.checked = input.value === state.show;
  find("sample-name").textContent = samples.length ? `${state.sample} of ${samples.length}` : "no samples";
  const unit = `${PER_MILLE === 1e3 ? "×10⁻³" : ""}`;
  find("threshold").value = state.threshold;
  find("threshold-value").textContent = `${round(densityScale.value(state.threshold) * PER_MILLE)} ${unit}`;
  find("opacity").value = state.opacity;
  find("opacity-value").textContent = `${Math.round(100 * state.opacity)} %`;
  find("colours").value = state.colours;
  find("fade").checked = state.fade;
  find("names").checked = state.names;
  AXES.forEach((_, axis) => {
    const row = document.querySelector(`#slices .row[data-axis="${axis}"]`);
    find(`plane-${axis}`).checked = state.planes[axis];
    find(`level-${axis}`).value = state.levels[axis];
    row.querySelector("output").textContent = `${plain(Math.round(10 * state.levels[axis]) / 10)} pc`;
    row.querySelector("button").setAttribute("aria-pressed", state.flat === axis);
  });
  find("play").textContent = playing ? "Stop" : "Play";
  find("theme").textContent = { auto: "Theme: system", dark: "Theme: dark", light: "Theme: light" }[state.theme];
  showPicked();
}

/** The table of numbers at the place that was picked. */
function showPicked() {
  const table = find("picked").querySelector("table");
  table.hidden = !state.picked;
  find("nothing").hidden = Boolean(state.picked);
  if (!state.picked) return;
  const at = numbersAt(state.picked);
  const unit = `10⁻³ ${about.unit}/pc`;
  const rows = [
    ["l, b", `${at.l.toFixed(1)}°, ${plain(Number(at.b.toFixed(1)))}°`],
    ["distance", `${plain(Number(at.distance.toFixed(1)))} pc`],
    ["X, Y, Z", `${at.place.map((x) => plain(Number(x.toFixed(1)))).join(", ")} pc`],
    [`ρ(${about.system})`, `${withError(at.density * PER_MILLE, at.std * PER_MILLE)} ${unit}`],
    [`${about.system}(<d)`, `${withError(at.column, at.columnStd)} ${about.unit}${at.sunOutside ? ", of what is in the box" : ""}`],
  ];
  if (state.show === "sample") rows.splice(4, 0, ["this sample", `${round(shownVolume(state).at(state.picked) * PER_MILLE)} ${unit}`]);
  if (at.drawn > 1) rows.push(["", `± of ${about.system}(<d) from ${at.drawn} samples`]);
  if (at.coverage !== undefined) rows.push(["coverage", `${at.coverage.toFixed(2)}: ${at.coverage > about.dominated ? "the data decide" : "the prior dominates"}`]);
  const body = table.tBodies[0];
  body.replaceChildren(...rows.map(([name, value]) => {
    const row = document.createElement("tr");
    const [head, cell] = [document.createElement("th"), document.createElement("td")];
    [head.textContent, cell.textContent] = [name, value];
    head.scope = "row";
    row.append(head, cell);
    return row;
  }));
}

/** What the page says of the map, and of its own precision. */
function showFacts() {
  const steps = about.grid.spacing;
  const spacing = new Set(steps).size > 1 ? steps.join(" × ") : steps[0];
  find("facts").textContent = `${about.system}, ${about.grid.shape.join(" × ")} voxels of ${spacing} pc`;
  const percent = (value) => `${(100 * value).toPrecision(2)} %`;
  const mean = volumes.get("mean");
  const error = about.positive ? percent(mean.error) : `${round(mean.error * PER_MILLE)}×10⁻³ ${about.unit}/pc`;
  const notes = [
    about.coarsened && `Coarser than the map: ${about.coarsened}.`,
    `Densities of this page are rounded by at most ${error}; dustmap query has them in full.`,
    samples.length && `${samples.length} of the map's ${about.grid.samples} posterior samples; standard deviations from so few have an error of up to ${Math.round(100 / Math.sqrt(samples.length))} %.`,
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

const VIEWS = { above: { yaw: -90, pitch: 90 }, side: { yaw: -90, pitch: 0 }, front: { yaw: 0, pitch: 0 } };

function look(name) {
  stop();
  change(name === "start" ? structuredClone({ ...start, theme: state.theme }) : { ...VIEWS[name], zoom: start.zoom, target: start.target });
}

function step(by) {
  if (samples.length === 0) return;
  const next = state.show === "sample" ? ((state.sample - 1 + by + samples.length) % samples.length) + 1 : state.sample;
  change({ show: "sample", sample: next });
}

function stop() {
  clearInterval(playing);
  playing = 0;
}

function play() {
  if (playing) stop();
  else if (samples.length > 1) {
    step(1);
    playing = setInterval(() => step(1), 800);
  }
  showControls();
}

function turn(dyaw, dpitch) {
  change({ yaw: ((state.yaw + dyaw + 540) % 360) - 180, pitch: Math.min(90, Math.max(-90, state.pitch + dpitch)) }, true);
}

function near(factor) {
  change({ zoom: Math.min(LIMITS.zoom[1], Math.max(LIMITS.zoom[0], state.zoom * factor)) }, true);
}

/** Move the target by pixels of the screen. */
function move(dx, dy) {
  const camera = cameraOf(state, scene.clientWidth, scene.clientHeight);
  const scale = (2 * camera.tangent[1] * camera.distance) / camera.height;
  change({ target: along(along(state.target, camera.right, -dx * scale), camera.up, dy * scale) }, true);
}

function pick(x, y) {
  const camera = cameraOf(state, scene.clientWidth, scene.clientHeight);
  const hit = firstHit(state, camera.eye, rayThrough(camera, x, y));
  if (!hit) say("No dust above the threshold there.");
  change({ picked: hit });
}

function slide(axis, level) {
  lastAxis = axis;
  change({ levels: state.levels.map((old, other) => (other === axis ? levelInBox(axis, level) : old)), flat: axis });
}

function cut(axis, on) {
  lastAxis = axis;
  change({ planes: state.planes.map((old, other) => (other === axis ? on : old)), flat: axis });
}

async function copyLink() {
  saveFragment();
  const address = `${location.href.replace(/#.*/, "")}#${fragmentOf(state)}`;
  try {
    await navigator.clipboard.writeText(address);
    say("The link to this view is copied.");
  } catch {
    say("The address of this page is the link to this view.");
  }
}

function savePicture() {
  draw(false);
  const whole = document.createElement("canvas");
  [whole.width, whole.height] = [canvases.over.width, canvases.over.height];
  const pen = whole.getContext("2d");
  pen.fillStyle = lookOf().paper;
  pen.fillRect(0, 0, whole.width, whole.height);
  for (const canvas of Object.values(canvases)) pen.drawImage(canvas, 0, 0, whole.width, whole.height);
  const link = document.createElement("a");
  link.download = "dustmap.png";
  link.href = whole.toDataURL("image/png");
  link.click();
}

/** The choice after the present one. */
function following(choices, now) {
  return choices[(choices.indexOf(now) + 1) % choices.length];
}

const within = (value, by) => Math.min(1, Math.max(0, value + by));
const KEYS = {
  ArrowLeft: () => turn(-5, 0), ArrowRight: () => turn(5, 0), ArrowUp: () => turn(0, 5), ArrowDown: () => turn(0, -5),
  "+": () => near(1.15), "=": () => near(1.15), "-": () => near(1 / 1.15),
  1: () => look("above"), 2: () => look("side"), 3: () => look("front"), r: () => look("start"),
  m: () => change({ show: "mean" }), u: () => volumes.has("spread") && change({ show: "spread" }),
  s: () => step(1), S: () => step(-1), " ": play,
  x: () => cut(0, !state.planes[0]), y: () => cut(1, !state.planes[1]), z: () => cut(2, !state.planes[2]),
  "[": () => slide(lastAxis, state.levels[lastAxis] - volumes.get("mean").spacing[lastAxis]),
  "]": () => slide(lastAxis, state.levels[lastAxis] + volumes.get("mean").spacing[lastAxis]),
  t: () => change({ threshold: within(state.threshold, 0.03) }), T: () => change({ threshold: within(state.threshold, -0.03) }),
  o: () => change({ opacity: within(state.opacity, 0.05) }), O: () => change({ opacity: within(state.opacity, -0.05) }),
  c: () => change({ colours: following(CHOICES.colours, state.colours) }),
  f: () => change({ fade: !state.fade }), n: () => change({ names: !state.names }),
  d: () => change({ theme: following(CHOICES.theme, state.theme) }),
  l: copyLink, p: savePicture, Escape: () => change({ picked: null }), "?": () => find("keys").showModal(),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || find("keys").open) return;
  // Controls keep the keys that they use themselves.
  const own = event.target.closest("input, select, button");
  if (own && (event.key.startsWith("Arrow") || event.key === " " || own.tagName === "SELECT")) return;
  const action = KEYS[event.key] ?? KEYS[event.key.toLowerCase()];
  if (!action) return;
  event.preventDefault();
  if (event.key !== " ") stop();
  action();
}

/** The mouse, the pen and fingers: one turns, two move and zoom, a click picks. */
function listenToPointers() {
  const down = new Map();
  let moved = 0;
  scene.addEventListener("pointerdown", (event) => {
    if (event.target.closest("button")) return;
    scene.setPointerCapture(event.pointerId);
    down.set(event.pointerId, [event.clientX, event.clientY]);
    if (down.size === 1) moved = 0;
  });
  scene.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId);
    if (!before) return;
    const [dx, dy] = [event.clientX - before[0], event.clientY - before[1]];
    moved += Math.abs(dx) + Math.abs(dy);
    const other = [...down].find(([id]) => id !== event.pointerId)?.[1];
    down.set(event.pointerId, [event.clientX, event.clientY]);
    if (moved < 4) return;
    if (other) {
      const length = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]);
      near(length([event.clientX, event.clientY]) / Math.max(1, length(before)));
      move(dx / 2, dy / 2);
    } else if (event.shiftKey || event.buttons === 2) move(dx, dy);
    else turn(-0.35 * dx, 0.35 * dy);
  });
  const up = (event) => {
    if (!down.delete(event.pointerId) || event.type !== "pointerup" || moved >= 4 || down.size) return;
    const box = scene.getBoundingClientRect();
    pick(event.clientX - box.left, event.clientY - box.top);
  };
  scene.addEventListener("pointerup", up);
  scene.addEventListener("pointercancel", up);
  scene.addEventListener("contextmenu", (event) => event.preventDefault());
  scene.addEventListener("wheel", (event) => {
    event.preventDefault();
    near(Math.exp(-0.0015 * event.deltaY));
  }, { passive: false });
}

function listen() {
  for (const input of document.getElementsByName("show")) {
    input.addEventListener("change", () => { stop(); change({ show: input.value }); });
  }
  const on = (id, kind, action) => find(id).addEventListener(kind, action);
  on("previous", "click", () => { stop(); step(-1); });
  on("next", "click", () => { stop(); step(1); });
  on("play", "click", play);
  for (const name of ["threshold", "opacity"]) on(name, "input", (event) => change({ [name]: Number(event.target.value) }));
  on("colours", "change", (event) => change({ colours: event.target.value }));
  for (const name of ["fade", "names"]) on(name, "change", (event) => change({ [name]: event.target.checked }));
  AXES.forEach((_, axis) => {
    on(`plane-${axis}`, "change", (event) => cut(axis, event.target.checked));
    on(`level-${axis}`, "input", (event) => slide(axis, Number(event.target.value)));
    document.querySelector(`#slices .row[data-axis="${axis}"] button`).addEventListener("click", () => change({ flat: axis }));
  });
  for (const button of document.querySelectorAll("#views button")) button.addEventListener("click", () => look(button.dataset.view));
  on("link", "click", copyLink);
  on("picture", "click", savePicture);
  on("theme", "click", KEYS.d);
  on("help", "click", KEYS["?"]);
  on("slice", "click", (event) => {
    const place = frame.placeAt(event.offsetX, event.offsetY);
    if (place) change({ picked: place });
  });
  listenToPointers();
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", () => change(stateOf(location.hash)));
  darkSystem.addEventListener("change", () => schedule());
  new ResizeObserver(() => schedule()).observe(scene);
}

/** Read the mean and draw it; then the rest, which switches and numbers need. */
async function open() {
  state = stateOf(location.hash);
  painter = makePainter(canvases.volume);
  if (!painter) throw new Error("this browser has no WebGL 2, which draws the dust");
  await Promise.all([volumes.get("mean"), volumes.get("coverage"), opaqueVolume(state), shownVolume(state)].map((volume) => volume?.load()));
  showFacts();
  listen();
  await change({});
  for (const volume of volumes.values()) await volume.load();
  showPicked();
}

// For scripts of one's own: what is shown, how to change it, and where a place is on the screen.
window.dustmap = {
  ready: open().catch((error) => {
    find("trouble").hidden = false;
    find("trouble").textContent = `The map cannot be drawn: ${error.message}.`;
    throw error;
  }),
  get state() { return structuredClone(state); },
  change,
  draw: () => draw(false),
  numbersAt,
  project: (place) => projected(cameraOf(state, scene.clientWidth, scene.clientHeight), place),
};
