// The dust, drawn by marching rays through 3-D textures; emission and absorption:
//
//   C = Σ_i T_i α_i c_i,   T_i = Π_{j<i} (1 − α_j),   α = 1 − exp(−κ w(t) Δs)
//
// t is the part of the colour scale at a place, w is 0 below the threshold and grows above it.

const VERTEX = `#version 300 es
void main() {
  vec2 corner = vec2(gl_VertexID == 1 ? 3.0 : -1.0, gl_VertexID == 2 ? 3.0 : -1.0);
  gl_Position = vec4(corner, 0.0, 1.0);
}`;

const FRAGMENT = `#version 300 es
precision highp float;
precision highp int;
precision highp sampler3D;
uniform vec2 pixels, tangent, opaqueScale, shownScale;
uniform vec3 eye, ahead, right, up, low, high, paper, planes, planeOn;
uniform vec3 opaqueSize, shownSize, coverageSize, light;
uniform sampler3D opaque, shown, coverage;
uniform sampler2D colours;
uniform float threshold, opacity, stride, dominated, fade, shift;
out vec4 picture;

float code(sampler3D volume, vec3 place, vec3 size) {
  return texture(volume, (place - low) / size).r;
}
vec3 colourAt(vec3 place) {
  float t = code(shown, place, shownSize) * shownScale.x + shownScale.y;
  return texture(colours, vec2((clamp(t, 0.0, 1.0) * 255.0 + 0.5) / 256.0, 0.5)).rgb;
}
float known(vec3 place) {
  if (fade == 0.0) return 1.0;
  float c = (code(coverage, place, coverageSize) * 255.0 - 1.0) / 254.0;
  return smoothstep(dominated - 0.1, dominated + 0.1, c);
}
float density(vec3 place) {
  float c = code(opaque, place, opaqueSize);
  return c * 255.0 < 0.5 ? -9.0 : c * opaqueScale.x + opaqueScale.y;
}
float noise(vec2 at) { return fract(52.9829189 * fract(dot(at, vec2(0.06711056, 0.00583715)))); }

void main() {
  vec2 across = 2.0 * gl_FragCoord.xy / pixels - vec2(1.0, 1.0 + shift);
  vec3 ray = normalize(ahead + across.x * tangent.x * right + across.y * tangent.y * up);
  vec3 safe = mix(ray, vec3(1e-7), vec3(lessThan(abs(ray), vec3(1e-7))));
  vec3 first = (low - eye) / safe, last = (high - eye) / safe;
  vec3 enter = min(first, last), leave = max(first, last);
  float near = max(max(enter.x, enter.y), max(enter.z, 0.0));
  float far = min(min(leave.x, leave.y), leave.z);
  picture = vec4(0.0);
  if (far <= near) return;
  vec3 cut = (planes - eye) / safe;
  float s = near, end = near + stride * (0.5 + 0.5 * noise(gl_FragCoord.xy));
  vec3 colour = vec3(0.0);
  float through = 1.0;
  for (int i = 0; i < 2048; ++i) {
    end = min(end, far);
    vec3 place = eye + 0.5 * (s + end) * ray;
    float t = density(place);
    float above = t - threshold;
    if (above > 0.0) {
      float rise = above / max(1.0 - threshold, 0.05);
      float weight = smoothstep(0.0, 0.06, above) * (0.12 + rise * (0.6 + 2.2 * rise));
      float sure = known(place);
      float alpha = 1.0 - exp(-opacity * weight * mix(0.1, 1.0, sure) * (end - s));
      float slope = t - density(place + light);
      vec3 own = colourAt(place) * clamp(1.0 + 1.1 * slope, 0.72, 1.22);
      own = mix(mix(vec3(dot(own, vec3(0.3, 0.6, 0.1))), paper, 0.5), min(own, 1.0), sure);
      colour += through * alpha * own;
      through *= 1.0 - alpha;
    }
    for (int axis = 0; axis < 3; ++axis) {
      if (planeOn[axis] > 0.5 && cut[axis] > s && cut[axis] <= end) {
        vec3 here = eye + cut[axis] * ray;
        if (code(shown, here, shownSize) * 255.0 > 0.5) {
          vec3 own = mix(mix(colourAt(here), paper, 0.68), colourAt(here), known(here));
          colour += through * 0.94 * own;
          through *= 0.06;
        }
      }
    }
    if (through < 0.015 || end >= far) break;
    s = end;
    end = s + stride;
  }
  picture = vec4(colour, 1.0 - through);
}`;

/** What draws the dust on a canvas; null where the browser has no WebGL 2. */
function makePainter(canvas) {
  const gl = canvas.getContext("webgl2", { alpha: true, antialias: false, premultipliedAlpha: true, preserveDrawingBuffer: true });
  if (!gl) return null;
  const program = gl.createProgram();
  for (const [kind, source] of [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]]) {
    const shader = gl.createShader(kind);
    gl.shaderSource(shader, source);
    gl.compileShader(shader);
    gl.attachShader(program, shader);
  }
  gl.linkProgram(program);
  if (!gl.getProgramParameter(program, gl.LINK_STATUS)) {
    throw new Error(gl.getProgramInfoLog(program) || gl.getShaderInfoLog(gl.getAttachedShaders(program)[1]));
  }
  gl.useProgram(program);
  const place = (name) => gl.getUniformLocation(program, name);
  const vector = (name, values) => gl[`uniform${values.length}fv`](place(name), values);
  const number = (name, value) => gl.uniform1f(place(name), value);
  ["opaque", "shown", "coverage", "colours"].forEach((name, unit) => gl.uniform1i(place(name), unit));
  const most = gl.getParameter(gl.MAX_3D_TEXTURE_SIZE);
  const side = Math.max(...[...volumes.values()].flatMap((volume) => volume.shape));
  if (side > most) throw new Error(`this browser draws at most ${most} voxels a side, and the map has ${side}`);
  const textures = new Map();

  function bind(unit, volume) {
    gl.activeTexture(gl.TEXTURE0 + unit);
    if (!textures.has(volume.name)) {
      const texture = gl.createTexture();
      gl.bindTexture(gl.TEXTURE_3D, texture);
      gl.pixelStorei(gl.UNPACK_ALIGNMENT, 1);
      gl.texImage3D(gl.TEXTURE_3D, 0, gl.R8, ...volume.shape, 0, gl.RED, gl.UNSIGNED_BYTE, volume.codes);
      for (const filter of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER]) gl.texParameteri(gl.TEXTURE_3D, filter, gl.LINEAR);
      for (const wrap of [gl.TEXTURE_WRAP_S, gl.TEXTURE_WRAP_T, gl.TEXTURE_WRAP_R]) gl.texParameteri(gl.TEXTURE_3D, wrap, gl.CLAMP_TO_EDGE);
      textures.set(volume.name, texture);
    }
    gl.bindTexture(gl.TEXTURE_3D, textures.get(volume.name));
  }

  function bindColours(table) {
    gl.activeTexture(gl.TEXTURE0 + 3);
    if (!textures.has(table)) {
      const texture = gl.createTexture();
      gl.bindTexture(gl.TEXTURE_2D, texture);
      gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA, 256, 1, 0, gl.RGBA, gl.UNSIGNED_BYTE, table);
      for (const filter of [gl.TEXTURE_MIN_FILTER, gl.TEXTURE_MAG_FILTER]) gl.texParameteri(gl.TEXTURE_2D, filter, gl.NEAREST);
      textures.set(table, texture);
    }
    gl.bindTexture(gl.TEXTURE_2D, textures.get(table));
  }

  /** Draw; coarse: steps as wide as voxels, while the camera moves. Returns milliseconds. */
  function draw(now, camera, table, paper, coarse) {
    const started = performance.now();
    const [opaque, shown] = [opaqueVolume(now), shownVolume(now)];
    const coverage = volumes.get("coverage");
    gl.viewport(0, 0, canvas.width, canvas.height);
    bind(0, opaque);
    bind(1, shown);
    bind(2, coverage ?? opaque);
    bindColours(table);
    const voxel = Math.min(...opaque.spacing);
    for (const name of ["eye", "ahead", "right", "up", "tangent"]) vector(name, camera[name]);
    vector("pixels", [canvas.width, canvas.height]);
    vector("low", about.box[0]);
    vector("high", about.box[1]);
    vector("paper", paper);
    vector("planes", now.levels);
    vector("planeOn", now.planes.map(Number));
    vector("opaqueSize", opaque.size);
    vector("shownSize", shown.size);
    vector("coverageSize", (coverage ?? opaque).size);
    // Light comes from above, over the left shoulder.
    const light = along(along(camera.up.map((x) => 0.8 * x), camera.right, -0.5), camera.ahead, -0.4);
    vector("light", light.map((x) => x * voxel * 1.2));
    vector("opaqueScale", densityScale.ofTexture(opaque));
    vector("shownScale", shownScale(now).ofTexture(shown));
    number("shift", camera.shift);
    number("threshold", now.threshold);
    // At one half, some dust halfway up the scale hides what is a twelfth of the box behind it.
    number("opacity", (400 * now.opacity ** 2.5) / DIAGONAL);
    number("stride", Math.max(voxel * (coarse ? 1.0 : 0.5), DIAGONAL / (coarse ? 160 : 700)));
    number("dominated", about.dominated);
    number("fade", now.fade && coverage ? 1 : 0);
    gl.drawArrays(gl.TRIANGLES, 0, 3);
    gl.readPixels(0, 0, 1, 1, gl.RGBA, gl.UNSIGNED_BYTE, new Uint8Array(4));
    return performance.now() - started;
  }
  return { draw };
}
