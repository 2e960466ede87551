// The camera turns about a target; +Z is up, and from above +X is to the right.

const HALF_ANGLE = (17.5 * Math.PI) / 180;

const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
const along = (a, direction, length) => a.map((x, i) => x + length * direction[i]);
const minus = (a, b) => a.map((x, i) => x - b[i]);
const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];

/** Eye and unit vectors of a view, and tangents of half its angles, on width × height pixels. */
function cameraOf(now, width, height) {
  const [yaw, pitch] = [now.yaw, now.pitch].map((angle) => (angle * Math.PI) / 180);
  const back = [Math.cos(pitch) * Math.cos(yaw), Math.cos(pitch) * Math.sin(yaw), Math.sin(pitch)];
  const up = [-Math.sin(pitch) * Math.cos(yaw), -Math.sin(pitch) * Math.sin(yaw), Math.cos(pitch)];
  const ahead = back.map((x) => -x);
  const small = Math.tan(HALF_ANGLE);
  const aspect = width / height;
  // The smaller side has the angle, so that the box fits in any window.
  const tangent = aspect > 1 ? [small * aspect, small] : [small, small / aspect];
  const distance = (0.55 * DIAGONAL) / Math.sin(HALF_ANGLE) / now.zoom;
  // The middle of the view is above that of the canvas, whose lower end has the scale.
  const shift = 50 / height;
  return { eye: along(now.target, back, distance), ahead, up, right: cross(ahead, up), tangent, distance, shift, width, height };
}

/** Pixels of a place, and its depth; null behind the eye. */
function projected(camera, place) {
  const away = minus(place, camera.eye);
  const depth = dot(away, camera.ahead);
  if (depth <= 1e-6 * DIAGONAL) return null;
  const x = dot(away, camera.right) / (depth * camera.tangent[0]);
  const y = dot(away, camera.up) / (depth * camera.tangent[1]);
  return { x: 0.5 * camera.width * (1 + x), y: 0.5 * camera.height * (1 - y - camera.shift), depth };
}

/** Unit vector from the eye through a pixel. */
function rayThrough(camera, x, y) {
  const across = (2 * x) / camera.width - 1;
  const upwards = 1 - (2 * y) / camera.height - camera.shift;
  const ray = along(along(camera.ahead, camera.right, across * camera.tangent[0]), camera.up, upwards * camera.tangent[1]);
  const length = Math.hypot(...ray);
  return ray.map((part) => part / length);
}

/** Distances where a ray enters and leaves the box; null where it passes by. */
function chord(eye, ray) {
  let [near, far] = [0, Infinity];
  for (let axis = 0; axis < 3; axis += 1) {
    const ends = [0, 1].map((side) => (about.box[side][axis] - eye[axis]) / ray[axis]);
    if (ray[axis] === 0) {
      if (eye[axis] < about.box[0][axis] || eye[axis] > about.box[1][axis]) return null;
    } else {
      near = Math.max(near, Math.min(...ends));
      far = Math.min(far, Math.max(...ends));
    }
  }
  return far > near ? [near, far] : null;
}

/** The first dust above the threshold along a ray, or a slice before it; null for none. */
function firstHit(now, eye, ray) {
  const ends = chord(eye, ray);
  if (!ends) return null;
  const volume = opaqueVolume(now);
  const least = densityScale.value(now.threshold);
  const slices = AXES.map((_, axis) => (now.planes[axis] ? (now.levels[axis] - eye[axis]) / ray[axis] : NaN));
  const inside = slices.filter((s) => s >= ends[0] && s <= ends[1]);
  const plane = inside.length ? Math.min(...inside) : Infinity;
  const step = 0.25 * Math.min(...volume.spacing);
  for (let s = ends[0] + 0.5 * step; s < Math.min(plane, ends[1]); s += step) {
    const place = along(eye, ray, s);
    if (volume.at(place) >= least) return place;
  }
  return plane < Infinity ? along(eye, ray, plane) : null;
}
