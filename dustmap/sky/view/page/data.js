// The map that the page holds: its volumes as bytes, their values at places, and integrals.

const about = JSON.parse(document.getElementById("about").textContent);
const AXES = ["X", "Y", "Z"];
// Densities are counted in thousandths, their size near the Sun.
const PER_MILLE = 1e3;

/** Bytes of base64 text. */
function bytesOf(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

/** Inflate, and sum the differences along x modulo 256. */
async function unpacked(text, across) {
  const packed = new Blob([bytesOf(text)]).stream();
  const plain = await new Response(packed.pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  const codes = new Uint8Array(plain);
  for (let start = 0; start < codes.length; start += across) {
    for (let i = start + 1; i < start + across; i += 1) codes[i] += codes[i - 1];
  }
  return codes;
}

/** A cube of codes 0..255 on voxels from the lower faces of the box on; 0 is no value. */
class Volume {
  constructor(description, number) {
    Object.assign(this, description);
    this.number = number;
    this.lower = about.box[0];
    this.size = this.shape.map((count, axis) => count * this.spacing[axis]);
    // Blocks at the upper faces have fewer voxels, and their centres are nearer: in blocks.
    this.ends = this.shape.map((count, axis) => {
      const voxels = about.grid.shape[axis] / this.factor;
      return count > 1 ? 0.5 * (count + voxels) - 1 : 0;
    });
    this.values = new Float64Array(256);
    for (let code = 0; code < 256; code += 1) {
      const u = this.low + ((this.high - this.low) * (code - 1)) / 254;
      this.values[code] = code === 0 ? NaN : this.logarithmic ? 10 ** u : u;
    }
    this.codes = null;
    this.loading = null;
  }

  /** Read the codes, once. */
  load() {
    if (!this.loading) {
      const element = document.getElementById(`volume-${this.number}`);
      this.loading = unpacked(element.textContent, this.shape[0]).then((codes) => {
        this.codes = codes;
        element.remove();
        return this;
      });
    }
    return this.loading;
  }

  /** The value at a place in pc: the trilinear interpolant of the voxels' centres. */
  at(place) {
    const [nx, ny, nz] = this.shape;
    const corner = [0, 0, 0];
    const share = [0, 0, 0];
    for (let axis = 0; axis < 3; axis += 1) {
      const last = this.shape[axis] - 1;
      const where = (place[axis] - this.lower[axis]) / this.spacing[axis] - 0.5;
      let clipped = Math.min(Math.max(where, 0), this.ends[axis]);
      if (last > 0 && clipped > last - 1) {
        clipped = last - 1 + (clipped - last + 1) / (this.ends[axis] - last + 1);
      }
      corner[axis] = Math.min(Math.floor(clipped), Math.max(last - 1, 0));
      share[axis] = clipped - corner[axis];
    }
    let sum = 0;
    for (let k = 0; k < 2; k += 1) {
      const z = Math.min(corner[2] + k, nz - 1);
      const alongZ = k ? share[2] : 1 - share[2];
      for (let j = 0; alongZ > 0 && j < 2; j += 1) {
        const y = Math.min(corner[1] + j, ny - 1);
        const weight = alongZ * (j ? share[1] : 1 - share[1]);
        if (weight === 0) continue;
        const row = (z * ny + y) * nx;
        if (share[0] < 1) sum += weight * (1 - share[0]) * this.values[this.codes[row + corner[0]]];
        if (share[0] > 0) sum += weight * share[0] * this.values[this.codes[row + Math.min(corner[0] + 1, nx - 1)]];
      }
    }
    return sum;
  }

  /** Integral in mag from the Sun to a place, of what lies in the box, in steps of half a voxel; NaN
   * through voxels that the map does not have. */
  integral(place) {
    const distance = Math.hypot(...place);
    const count = Math.max(1, Math.ceil(distance / (0.5 * Math.min(...this.spacing))));
    let sum = 0;
    for (let i = 0; i < count; i += 1) {
      const here = place.map((x) => (x * (i + 0.5)) / count);
      if (inBox(here)) sum += this.at(here);
    }
    return (sum * distance) / count;
  }
}

const volumes = new Map(about.volumes.map((each, i) => [each.name, new Volume(each, i)]));
const samples = [...volumes.values()].filter((volume) => volume.name.startsWith("sample"));

/** Whether a place lies between the outer faces of the map's voxels. */
function inBox(place) {
  return place.every((x, axis) => x >= about.box[0][axis] && x <= about.box[1][axis]);
}

/** Names of points, and where they are; those outside the box are not drawn, which the page says. */
const points = about.points.map(([name, ...place]) => ({ name, place })).filter((point) => inBox(point.place));

/** l and b in degrees, and the distance in pc, of a place. */
function galactic([x, y, z]) {
  const distance = Math.hypot(x, y, z);
  const degree = 180 / Math.PI;
  return { l: (Math.atan2(y, x) * degree + 360) % 360, b: distance > 0 ? Math.asin(z / distance) * degree : 0, distance };
}

/** Σ (x − mean)² over the divisor. */
function spreadOver(values, divisor) {
  const middle = values.reduce((sum, value) => sum + value, 0) / values.length;
  return values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / divisor;
}

/** The variance of draws; those of a positive density come in pairs c ± δ, one beside the other. */
function variance(drawn) {
  const count = drawn.length;
  if (!about.positive) return spreadOver(drawn, count - 1);
  if (count % 2) return spreadOver(drawn, count - 1 / count);
  const pairs = count / 2;
  const odd = Array.from({ length: pairs }, (_, p) => 0.5 * (drawn[2 * p] - drawn[2 * p + 1]));
  const even = Array.from({ length: pairs }, (_, p) => 0.5 * (drawn[2 * p] + drawn[2 * p + 1]));
  const linear = odd.reduce((sum, value) => sum + value * value, 0) / pairs;
  return pairs > 1 ? linear + spreadOver(even, pairs - 1) : linear;
}

/** The numbers at a place, of the posterior; undefined where the map has no such volume. */
function numbersAt(place) {
  const at = (volume) => (inBox(place) ? volume.at(place) : NaN);
  const get = (name) => (volumes.get(name)?.codes ? at(volumes.get(name)) : undefined);
  const density = get("mean");
  const spread = get("spread");
  const drawn = samples.filter((each) => each.codes).map((each) => each.integral(place));
  return {
    ...galactic(place),
    place,
    density,
    std: spread === undefined ? undefined : about.positive ? spread * density : spread,
    coverage: get("coverage"),
    column: volumes.get("mean").integral(place),
    columnStd: drawn.length > 1 ? Math.sqrt(variance(drawn)) : undefined,
    drawn: drawn.length,
    sunOutside: !inBox([0, 0, 0]),
  };
}

/** Part of a colour scale, 0 to 1 between its ends, at a value; and back. */
function scaleOf(ends) {
  const of = about.positive ? Math.log10 : (value) => value;
  const [low, high] = ends.map(of);
  return {
    ends,
    part: (value) => (of(value) - low) / (high - low),
    value: (part) => (about.positive ? 10 ** (low + part * (high - low)) : low + part * (high - low)),
    // What takes a code c/255 of a volume's texture to the part: [slope, intercept].
    ofTexture(volume) {
      const step = (volume.high - volume.low) / 254;
      return [(255 * step) / (high - low), (volume.low - step - low) / (high - low)];
    },
  };
}
const densityScale = scaleOf(about.density);
const spreadScale = scaleOf(about.spread);
