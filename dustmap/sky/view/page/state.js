// What is shown, as a plain object, and as the fragment of the address, which links can carry.

const CENTRE = AXES.map((_, axis) => 0.5 * (about.box[0][axis] + about.box[1][axis]));
const DIAGONAL = Math.hypot(...AXES.map((_, axis) => about.box[1][axis] - about.box[0][axis]));

/** A level inside the box on an axis. */
function levelInBox(axis, level) {
  return Math.min(Math.max(level, about.box[0][axis]), about.box[1][axis]);
}

const start = Object.freeze({
  show: "mean",
  sample: 1,
  threshold: densityScale.part(about.threshold),
  opacity: 0.5,
  colours: Object.keys(about.colours)[0],
  fade: true,
  names: true,
  planes: [false, false, false],
  levels: AXES.map((_, axis) => levelInBox(axis, 0)),
  flat: 2,
  yaw: -60,
  pitch: 30,
  zoom: 1,
  target: CENTRE,
  picked: null,
  theme: "auto",
});
let state = structuredClone(start);

const CHOICES = { show: ["mean", "spread", "sample"], theme: ["auto", "dark", "light"], colours: Object.keys(about.colours) };
const LIMITS = { sample: [1, Math.max(samples.length, 1)], opacity: [0, 1], threshold: [0, 1], yaw: [-Infinity, Infinity], pitch: [-90, 90], zoom: [0.2, 40] };

/** Six digits, no more than a link needs. */
function digits(value) {
  return String(Number(value.toPrecision(6)));
}

/** What differs from the start, as name=value&...; the threshold as a density. */
function fragmentOf(now) {
  const said = [];
  const say = (name, text) => said.push(`${name}=${text}`);
  for (const name of ["show", "theme", "colours"]) if (now[name] !== start[name]) say(name, now[name]);
  for (const name of ["sample", "opacity", "yaw", "pitch", "zoom"]) if (now[name] !== start[name]) say(name, digits(now[name]));
  for (const name of ["fade", "names"]) if (now[name] !== start[name]) say(name, Number(now[name]));
  if (now.threshold !== start.threshold) say("threshold", digits(densityScale.value(now.threshold)));
  const on = AXES.filter((_, axis) => now.planes[axis]).join("");
  if (on) say("planes", on);
  AXES.forEach((name, axis) => {
    if (now.levels[axis] !== start.levels[axis]) say(name.toLowerCase(), digits(now.levels[axis]));
  });
  if (now.flat !== start.flat) say("flat", AXES[now.flat]);
  if (now.target.some((x, axis) => x !== CENTRE[axis])) say("target", now.target.map(digits).join(","));
  if (now.picked) say("picked", now.picked.map(digits).join(","));
  return said.join("&");
}

/** Name and text of a pair name=text; empty ones of what is no text. */
function decoded(pair) {
  try {
    return pair.split("=").map(decodeURIComponent);
  } catch {
    return ["", ""];
  }
}

/** The state that a fragment describes; what cannot be read is as at the start. */
function stateOf(fragment) {
  const now = structuredClone(start);
  for (const pair of fragment.replace(/^#/, "").split("&")) {
    const [name, text] = decoded(pair);
    const number = Number(text);
    const triple = (text ?? "").split(",").map(Number);
    if (Object.hasOwn(CHOICES, name)) now[name] = CHOICES[name].includes(text) ? text : start[name];
    else if (name === "threshold") now.threshold = Math.min(Math.max(densityScale.part(number) || 0, 0), 1);
    else if (Object.hasOwn(LIMITS, name) && Number.isFinite(number)) now[name] = Math.min(Math.max(number, LIMITS[name][0]), LIMITS[name][1]);
    else if (name === "fade" || name === "names") now[name] = text === "1";
    else if (name === "planes") now.planes = AXES.map((axis) => (text ?? "").includes(axis));
    else if (name === "flat" && AXES.includes(text)) now.flat = AXES.indexOf(text);
    else if ("xyz".includes(name) && name.length === 1 && Number.isFinite(number)) now.levels["xyz".indexOf(name)] = levelInBox("xyz".indexOf(name), number);
    else if ((name === "target" || (name === "picked" && inBox(triple))) && triple.length === 3 && triple.every(Number.isFinite)) now[name] = triple;
  }
  now.sample = Math.round(now.sample);
  return now.show === "mean" || shownVolume(now) ? now : { ...now, show: "mean" };
}

/** The volume whose colours are shown. */
function shownVolume(now) {
  return volumes.get(now.show === "sample" ? `sample ${now.sample}` : now.show);
}

/** The volume whose density is opaque: a sample's own, else the mean. */
function opaqueVolume(now) {
  return now.show === "sample" ? shownVolume(now) : volumes.get("mean");
}

/** The scale of the colours that are shown. */
function shownScale(now) {
  return now.show === "spread" ? spreadScale : densityScale;
}
