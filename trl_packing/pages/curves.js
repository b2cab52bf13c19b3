// Draws the charts of run_page.py. Text is written with textContent only.
const PLACE = { steps: 0, documents: 1, tokens: 2, hours: 3 };
const VALUE = 4;
const HEIGHT = 220, LEFT = 54, RIGHT = 12, TOP = 8, BOTTOM = 36;
const DASHES = ['', '7 3', '2 3', '9 3 2 3'];
const state = { axis: data.axis, smooth: 0, log: false, reload: true, hidden: new Set() };

// --- numbers and ticks ---------------------------------------------------------------------

const short = (value) => {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e15)) return value.toExponential(2).replace(/\.?0+e/, 'e');
  for (const [unit, letter] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e4, 'k']])
    if (size >= unit) return `${+(value / (letter === 'k' ? 1e3 : unit)).toPrecision(4)}${letter}`;
  return String(+value.toPrecision(5));
};
const exact = (value) => value.toLocaleString('en-US', { maximumSignificantDigits: 6 });
const valueText = (chart, value) => chart.percent ? `${exact(value * 100)} %` : size4(value);
const size4 = (value) => Math.abs(value) >= 1e-3 || value === 0 ? exact(value) : short(value);

function stepBetween(low, high, most) {
  const rough = (high - low) / most, magnitude = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((s) => s * magnitude).find((s) => s >= rough * (1 - 1e-9));
}

function ticks(low, high, most) {
  const step = stepBetween(low, high, most), found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}

function logTicks(low, high) {  // of an axis in powers of ten
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++)
    for (const digit of high - low > 2.5 ? [1] : [1, 2, 5]) {
      const at = power + Math.log10(digit);
      if (at >= low - 1e-9 && at <= high + 1e-9) found.push(at);
    }
  return found.length > 1 ? found : [low, high];
}

// --- elements ------------------------------------------------------------------------------

function svg(name, attributes, parent) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (parent) parent.append(element);
  return element;
}

function tag(name, className, text, parent) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

const color = (curve) => `var(--c${curve.color % 8})`;
const dash = (curve) => DASHES[Math.floor(curve.color / 4) % DASHES.length];

// --- the x-axis ----------------------------------------------------------------------------

const longest = Math.max(0, ...data.charts.flatMap((c) => c.curves.flatMap((v) => v.points.map((p) => p[PLACE.hours] ?? 0))));
const [perUnit, unit] = longest >= 5400 ? [3600, 'hours'] : longest >= 120 ? [60, 'minutes'] : [1, 'seconds'];
const xOf = (point) => {
  const x = point[PLACE[state.axis]];
  return x === null || x === undefined ? null : state.axis === 'hours' ? x / perUnit : x;
};
const axisLabel = () => data.labels[state.axis] + (state.axis === 'hours' ? ` (${unit}), without evaluation and saving` : '');

function placeText(point) {
  const [step, documents, tokens, seconds] = point, words = [];
  if (step !== null) words.push(`step ${exact(step)}`);
  if (documents !== null) words.push(`${documents.toLocaleString('en-US')} documents`);
  if (tokens !== null) words.push(`${tokens.toLocaleString('en-US')} tokens`);
  if (seconds !== null) words.push(`${exact(+(seconds / perUnit).toPrecision(4))} ${unit}`);
  return words.join(' · ');
}

// --- a chart -------------------------------------------------------------------------------

function smoothed(points) {  // moving average with exponential weights, corrected at the start
  let sum = 0, weight = 0;
  return points.map((p) => {
    if (p[VALUE] === null) return p;
    sum = sum * state.smooth + p[VALUE] * (1 - state.smooth);
    weight = weight * state.smooth + (1 - state.smooth);
    return [...p.slice(0, VALUE), sum / weight];
  });
}

class Frame {
  constructor(figure, chart) {
    Object.assign(this, { figure, chart });
    this.canvas = svg('svg', { role: 'img', tabindex: 0, 'aria-label': figure.querySelector('figcaption').textContent });
    figure.append(this.canvas);
    if (chart.curves.length > 1) this.addLegend();
    this.tip = tag('div', 'tip', '', figure);
    this.tip.hidden = true;
    this.canvas.addEventListener('pointermove', (event) => {
      const box = this.canvas.getBoundingClientRect();
      show(this, this.invert(event.clientX - box.left));
    });
    this.canvas.addEventListener('pointerleave', () => show(null, null));
    this.canvas.addEventListener('blur', () => show(null, null));
    this.canvas.addEventListener('keydown', (event) => this.walk(event));
  }

  addLegend() {
    const legend = tag('div', 'legend', '', this.figure);
    for (const curve of this.chart.curves) {
      const button = tag('button', '', '', legend);
      button.type = 'button';
      const sample = svg('svg', { viewBox: '0 0 22 8', 'aria-hidden': true }, button);
      svg('path', { d: 'M0 4H22', style: `stroke:${color(curve)};stroke-width:3`, 'stroke-dasharray': dash(curve) }, sample);
      tag('span', '', curve.name, button);
      button.setAttribute('aria-pressed', true);
      button.addEventListener('click', () => {
        const hide = !state.hidden.delete(curve.name);
        if (hide) state.hidden.add(curve.name);
        for (const frame of frames) frame.draw();
      });
      curve.button = button;
    }
  }

  get shown() { return this.chart.curves.filter((c) => this.chart.curves.length === 1 || !state.hidden.has(c.name)); }

  draw() {
    const width = this.figure.clientWidth;
    if (!width) return;  // inside a closed <details>
    this.canvas.replaceChildren();
    this.canvas.setAttribute('viewBox', `0 0 ${width} ${HEIGHT}`);
    this.width = width;
    for (const curve of this.chart.curves) curve.button?.setAttribute('aria-pressed', this.shown.includes(curve));
    this.lines = this.shown.map((curve) => ({ curve, points: curve.points.filter((p) => xOf(p) !== null) }));
    const points = this.lines.flatMap((line) => line.points), values = points.map((p) => p[VALUE]).filter((v) => v !== null);
    this.empty = !values.length;
    if (this.empty) {
      const words = this.shown.length ? `not known over ${state.axis}` : 'all curves are hidden';
      svg('text', { x: width / 2, y: HEIGHT / 2, 'text-anchor': 'middle' }, this.canvas).textContent = words;
      return;
    }
    this.isLog = state.log && this.chart.may_be_log && values.every((v) => v > 0);
    this.setRanges(points.map(xOf), values);
    this.drawAxes();
    this.lines.forEach((line, i) => { line.over = this.lines.slice(0, i).filter((other) => this.hides(line, other)).length; });
    for (const line of this.lines) this.drawLine(line);
    this.cursor = svg('g', {}, this.canvas);
  }

  setRanges(xs, values) {
    let low = 0, high = Math.max(...xs);  // a run begins at 0
    if (high <= low) high = low + 1;
    this.range = [low, high];
    [low, high] = [Math.min(...values), Math.max(...values)].map((v) => this.isLog ? Math.log10(v) : v);
    const room = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    const floor = !this.isLog && low >= 0 ? 0 : -Infinity;
    this.values = [Math.max(low - room, floor), high + room];
    if (this.chart.percent && high <= 1) this.values[1] = Math.min(high + room, Math.max(high, 1));
    if (this.values[0] === this.values[1]) this.values[0] -= room;
  }

  x(value) { return LEFT + (this.width - LEFT - RIGHT) * (value - this.range[0]) / (this.range[1] - this.range[0]); }
  invert(pixels) { return this.range && this.range[0] + (this.range[1] - this.range[0]) * (pixels - LEFT) / (this.width - LEFT - RIGHT); }
  y(value) {
    const at = this.isLog ? Math.log10(value) : value;
    return TOP + (HEIGHT - TOP - BOTTOM) * (this.values[1] - at) / (this.values[1] - this.values[0]);
  }

  drawAxes() {
    const base = HEIGHT - BOTTOM, right = this.width - RIGHT;
    const marks = this.isLog ? logTicks(...this.values).map((v) => 10 ** v) : ticks(...this.values, 5);
    for (const value of marks) {
      svg('path', { class: 'grid', d: `M${LEFT} ${this.y(value)}H${right}` }, this.canvas);
      const text = this.chart.percent ? `${+(value * 100).toPrecision(4)}%` : short(+value.toPrecision(3));
      svg('text', { x: LEFT - 6, y: this.y(value) + 4, 'text-anchor': 'end' }, this.canvas).textContent = text;
    }
    svg('path', { class: 'axis', d: `M${LEFT} ${base}H${right}` }, this.canvas);
    for (const value of ticks(...this.range, Math.max(2, this.width / 90)))
      svg('text', { x: this.x(value), y: base + 15, 'text-anchor': 'middle' }, this.canvas).textContent = short(value);
    svg('text', { x: (LEFT + right) / 2, y: HEIGHT - 4, 'text-anchor': 'middle' }, this.canvas).textContent = axisLabel();
    let free = -Infinity;  // where the next label fits
    for (const [label, place] of data.marks) {
      const at = xOf(place);
      if (at === null) continue;
      const line = svg('path', { class: 'mark', d: `M${this.x(at)} ${TOP}V${base}` }, this.canvas);
      svg('title', {}, line).textContent = label;
      if (this !== frames[0] || this.x(at) < free) continue;
      const text = svg('text', { x: this.x(at) + 4, y: TOP + 9 }, this.canvas);
      text.textContent = label;
      const size = text.getComputedTextLength() + 8;
      free = this.x(at) + size;
      if (free > right) text.remove();
    }
  }

  // Whether two lines lie on each other; the later one is dashed then, so that both are seen.
  hides(line, other) {
    const far = (p, q) => p[VALUE] === null || q[VALUE] === null ? p[VALUE] !== q[VALUE]
      : Math.hypot(this.x(xOf(p)) - this.x(xOf(q)), this.y(p[VALUE]) - this.y(q[VALUE])) > 1.5;
    return line.points.length === other.points.length && !line.points.some((p, i) => far(p, other.points[i]));
  }

  drawLine(line) {
    const { curve, points } = line;
    line.drawn = state.smooth ? smoothed(points) : points;
    const style = `stroke:${color(curve)}`;
    if (state.smooth) svg('path', { class: 'line faint', d: this.path(points), style }, this.canvas);
    const gaps = line.over ? `6 ${6 * line.over}` : dash(curve);
    svg('path', { class: 'line', d: this.path(line.drawn), style, 'stroke-dasharray': gaps }, this.canvas);
    const real = line.drawn.filter((p) => p[VALUE] !== null);
    if (real.length <= 40 || line.drawn.length !== real.length)
      for (const p of real.length <= 40 ? real : lonely(line.drawn))
        svg('circle', { cx: this.x(xOf(p)), cy: this.y(p[VALUE]), r: 2.2 / (1 + line.over), style: `fill:${color(curve)}` }, this.canvas);
    const base = HEIGHT - BOTTOM;
    for (const p of points.filter((q) => q[VALUE] === null)) {
      const x = this.x(xOf(p));
      svg('path', { class: 'gap', d: `M${x - 4} ${base - 4}l8 8m0 -8l-8 8` }, this.canvas);
    }
  }

  path(points) {
    let joined = false;
    return points.map((p) => {
      if (p[VALUE] === null) { joined = false; return ''; }
      const at = `${joined ? 'L' : 'M'}${this.x(xOf(p)).toFixed(1)} ${this.y(p[VALUE]).toFixed(1)}`;
      joined = true;
      return at;
    }).join('');
  }

  nearest(x) {  // the nearest point of each line
    return this.lines.map((line) => {
      let best = -1;
      line.points.forEach((p, i) => { if (best < 0 || Math.abs(xOf(p) - x) < Math.abs(xOf(line.points[best]) - x)) best = i; });
      return best < 0 ? null : { curve: line.curve, point: line.points[best], drawn: line.drawn[best] };
    }).filter(Boolean);
  }

  showAt(x, isHovered) {
    if (!this.cursor) return;
    this.cursor.replaceChildren();
    this.tip.hidden = true;
    if (x === null || this.empty) return;
    const found = this.nearest(x);
    if (!found.length) return;
    const closest = found.reduce((a, b) => Math.abs(xOf(b.point) - x) < Math.abs(xOf(a.point) - x) ? b : a);
    const at = this.x(xOf(closest.point));
    svg('path', { class: 'cursor', d: `M${at} ${TOP}V${HEIGHT - BOTTOM}` }, this.cursor);
    for (const { curve, drawn } of found)
      if (drawn[VALUE] !== null)
        svg('circle', { cx: this.x(xOf(drawn)), cy: this.y(drawn[VALUE]), r: 4, style: `fill:${color(curve)}` }, this.cursor);
    if (isHovered) this.showTip(found, closest, at);
  }

  showTip(found, closest, at) {
    this.tip.replaceChildren();
    tag('span', 'note', placeText(closest.point), this.tip);
    for (const { curve, point, drawn } of found) {
      const row = tag('div', '', '', this.tip), name = tag('span', '', curve.name, row);
      name.style.color = color(curve);
      let text = point[VALUE] === null ? 'NaN or infinite' : valueText(this.chart, point[VALUE]);
      if (state.smooth && point[VALUE] !== null) text += ` (smoothed ${valueText(this.chart, drawn[VALUE])})`;
      if (xOf(point) !== xOf(closest.point)) text += ` at ${short(xOf(point))}`;
      tag('b', '', text, row);
    }
    this.tip.hidden = false;
    const room = this.figure.clientWidth - this.tip.offsetWidth, left = at > this.width / 2 ? at - this.tip.offsetWidth - 12 : at + 12;
    this.tip.style.left = `${Math.max(0, Math.min(room, left))}px`;
    this.tip.style.top = `${this.canvas.getBoundingClientRect().top - this.figure.getBoundingClientRect().top + 4}px`;
  }

  walk(event) {  // arrow keys move the cursor from point to point
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || this.empty) return;
    event.preventDefault();
    const xs = [...new Set(this.lines.flatMap((l) => l.points.map(xOf)))].sort((a, b) => a - b);
    const next = this.walked === undefined ? 0 : Math.max(0, Math.min(xs.length - 1, xs.indexOf(this.walked) + by));
    this.walked = xs[next];
    show(this, this.walked);
  }
}

const lonely = (points) => points.filter((p, i) =>
  p[VALUE] !== null && (points[i - 1]?.[VALUE] ?? null) === null && (points[i + 1]?.[VALUE] ?? null) === null);

function show(hovered, x) { for (const frame of frames) frame.showAt(x, frame === hovered); }

// --- controls: their state is in the address, so that it survives a reload ------------------

const frames = [...document.querySelectorAll('[data-chart]')].map((f) => new Frame(f, data.charts[+f.dataset.chart]));
const controls = Object.fromEntries(['smooth', 'log', 'reload', 'warning'].map((id) => [id, document.getElementById(id)]));
const radios = [...document.querySelectorAll('input[name=axis]')];

function readAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (radios.some((r) => r.value === asked.get('over'))) state.axis = asked.get('over');
  state.smooth = Math.max(0, Math.min(0.99, +asked.get('smooth') || 0));
  state.log = asked.get('log') === '1';
  state.reload = asked.get('reload') !== '0';
}

function writeAddress() {
  const asked = new URLSearchParams({ over: state.axis, smooth: state.smooth, log: +state.log, reload: +state.reload });
  history.replaceState(null, '', `#${asked}`);
}

function update() {
  for (const radio of radios) radio.checked = radio.value === state.axis;
  controls.smooth.value = state.smooth;
  controls.log.checked = state.log;
  if (controls.reload) controls.reload.checked = state.reload;
  const words = data.warnings[state.axis];
  controls.warning.textContent = words ?? '';
  controls.warning.hidden = !words;
  for (const frame of frames) frame.draw();
}

if (controls.smooth) {
  readAddress();
  const change = (apply) => (event) => { apply(event.target); writeAddress(); update(); };
  for (const radio of radios) radio.addEventListener('change', change((r) => { state.axis = r.value; }));
  controls.smooth.addEventListener('input', change((r) => { state.smooth = +r.value; }));
  controls.log.addEventListener('change', change((r) => { state.log = r.checked; }));
  controls.reload?.addEventListener('change', change((r) => { state.reload = r.checked; }));
  for (const folded of document.querySelectorAll('details')) folded.addEventListener('toggle', update);
  let width = 0;
  addEventListener('resize', () => { if (innerWidth !== width) { width = innerWidth; update(); } });
  update();
}
if (data.reloads) setInterval(() => { if (state.reload && !document.hidden) location.reload(); }, 30000);
