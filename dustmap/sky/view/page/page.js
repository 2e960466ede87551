// The controls, the keyboard and the mouse; every change of the state draws the page again.

const scene = find("scene");
const canvases = { under: find("under"), volume: find("volume"), over: find("over") };
const darkSystem = window.matchMedia("(prefers-color-scheme: dark)");
let painter = null;
let frame = null;
let scheduled = 0;
let settling = 0;
let playing = 0;
let lastAxis = 2;
// Milliseconds a pixel of the last picture, with full steps; 0 before the first.
let cost = 0;
let drawnSlice = "";
let [drawnWidth, drawnHeight] = [0, 0];
// Milliseconds that a picture takes at most: while it moves, and at rest.
const SMOOTH = 33;
const PATIENCE = 700;

function isDark() {
  return state.theme === "dark" || (state.theme === "auto" && darkSystem.matches);
}

/** Pixels of the dust for each of the page: fewer while it moves, or where the browser is slow. */
function sharpness(pixels, moving) {
  const most = moving ? 1 : Math.min(window.devicePixelRatio || 1, 2);
  if (cost === 0) return moving ? 0.5 : most;
  const affordable = Math.sqrt((moving ? 2 * SMOOTH : PATIENCE) / (cost * pixels));
  return Math.min(most, Math.max(affordable, moving ? 0.15 : 0.35));
}

/** Draw all there is; moving: fewer rays and longer steps; exact: as many as there are pixels. */
function draw(moving, exact = false) {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  const [width, height] = [scene.clientWidth, scene.clientHeight];
  [drawnWidth, drawnHeight] = [width, height];
  const look = lookOf();
  const table = tableOf(state, isDark());
  const camera = cameraOf(state, width, height);
  const share = exact ? Math.max(1, window.devicePixelRatio || 1) : sharpness(width * height, moving);
  const size = [width, height].map((length) => Math.max(1, Math.round(length * share)));
  if (canvases.volume.width !== size[0] || canvases.volume.height !== size[1]) [canvases.volume.width, canvases.volume.height] = size;
  const spent = painter.draw(state, camera, table, partsOf(look.paper), moving);
  cost = ((moving ? 2 : 1) * spent) / (size[0] * size[1]);
  drawUnder(cleared(canvases.under, width, height), camera, look);
  const pen = cleared(canvases.over, width, height);
  const writer = makeWriter(pen, look, width, height);
  drawScale(pen, state, look, writer, 20, height - 42, Math.min(250, width - 60), table);
  const seen = drawPoints(pen, camera, look, state);
  const marked = state.picked && projected(camera, state.picked);
  if (marked) writer.keep([marked.x - 10, marked.y - 10, marked.x + 10, marked.y + 10]);
  drawDirections(pen, camera, look, writer);
  drawAxes(pen, camera, look, writer);
  if (state.names) drawNames(seen, writer);
  const { yaw, pitch, zoom, target, opacity, threshold, ...flat } = state;
  const key = JSON.stringify([flat, look, find("slice").clientWidth]);
  if (key !== drawnSlice) frame = drawSlice(find("slice"), state, look, table);
  drawnSlice = key;
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

/** Draw now, as sharp as the screen, in place of whatever waits to be drawn. */
function drawNow() {
  clearTimeout(settling);
  cancelAnimationFrame(scheduled);
  scheduled = 0;
  draw(false, true);
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

function showControls() {
  for (const input of document.getElementsByName("show")) input.checked = input.value === state.show;
  find("sample-name").textContent = samples.length ? `${state.sample} of ${samples.length}` : "no samples";
  find("threshold").value = state.threshold;
  find("threshold-value").textContent = `${round(densityScale.value(state.threshold) * PER_MILLE)} ×10⁻³`;
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
  change({ levels: state.levels.map((old, other) => (other === axis ? levelInBox(axis, level) : old)), flat: axis }, true);
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
  drawNow();
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
  for (const name of ["threshold", "opacity"]) on(name, "input", (event) => change({ [name]: Number(event.target.value) }, true));
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
  on("forget", "click", KEYS.Escape);
  on("slice", "click", (event) => {
    const place = frame.placeAt(event.offsetX, event.offsetY);
    if (place) change({ picked: place });
  });
  listenToPointers();
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", () => change(stateOf(location.hash)));
  darkSystem.addEventListener("change", () => schedule());
  new ResizeObserver(() => {
    if (canvases.over.clientWidth !== drawnWidth || canvases.over.clientHeight !== drawnHeight) schedule();
  }).observe(scene);
}

/** Read the mean and draw it; then the rest, which switches and numbers need. */
async function open() {
  state = stateOf(location.hash);
  painter = makePainter(canvases.volume);
  if (!painter) throw new Error("this browser has no WebGL 2, which draws the dust");
  canvases.volume.addEventListener("webglcontextlost", () => complain("the graphics card has lost it; load the page again"));
  await Promise.all([volumes.get("mean"), volumes.get("coverage"), opaqueVolume(state), shownVolume(state)].map((volume) => volume?.load()));
  showFacts();
  listen();
  await change({}, true);
  for (const volume of volumes.values()) await volume.load();
  showPicked();
}

function complain(words) {
  find("trouble").hidden = false;
  find("trouble").textContent = `The map cannot be drawn: ${words}.`;
}

// For scripts of one's own: what is shown, how to change it, and where a place is on the screen.
window.dustmap = {
  ready: open().catch((error) => {
    complain(error.message);
    throw error;
  }),
  get state() { return structuredClone(state); },
  change,
  draw: drawNow,
  numbersAt,
  project: (place) => projected(cameraOf(state, scene.clientWidth, scene.clientHeight), place),
};
