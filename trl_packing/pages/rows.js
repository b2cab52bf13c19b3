// Draws packed rows as strips, one of them as tokens, and its attention mask.
// A strip has segments: tokens that the same documents hold. Where documents share no prefixes, each
// document is one segment.
// Text of documents is written by textContent alone.

const SVG = "http://www.w3.org/2000/svg";
const HUES = 6;
const IGNORED = -100;
const count = (n) => n.toLocaleString("en-US");
const inTokens = (n) => `${count(n)} token${n === 1 ? "" : "s"}`;
const byId = (id) => document.getElementById(id);

function element(tag, attributes = {}, ...children) {
  const isSvg = ["svg", "g", "rect", "path", "polygon", "title", "pattern", "defs"].includes(tag);
  const made = isSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

for (const row of data.rows) row.segments = segmentsOf(row);

function segmentsOf(row) {
  const alone = { position: 0, parent: null, level: 0, repeats: false };
  if (!row.segments) {
    return row.documents.map((d, k) => ({ ...alone, start: d.start, stop: d.stop, documents: [k] }));
  }
  const end = row.segments.at(-1).stop;
  return end === row.stop ? row.segments
    : [...row.segments, { ...alone, start: end, stop: row.stop, documents: [] }];
}

const isShared = (row) => row.realTokens !== undefined;
const shadeOf = (row, k) => (row.documents[k].number === null ? "pad" : `of${k % HUES}`);

function shade(row, segment) {
  const { documents } = segment;
  return documents.length > 1 ? "shared" : documents.length ? shadeOf(row, documents[0]) : "pad";
}

function segmentAt(row, i) {
  return row.segments.find((s) => row.start + i < s.stop);
}

// Segments from the beginning of its documents to `segment`.
function pathOf(row, segment) {
  const before = segment.parent === null ? [] : pathOf(row, row.segments[segment.parent]);
  return [...before, segment];
}

const widest = Math.max(data.capacity ?? 0, ...data.rows.map((row) => row.stop - row.start));
const heaviest = data.rows.reduce(
  (most, row) => row.ids.reduce((m, _, i) => Math.max(m, meanWeight(row, i)), most), 0);

// Weight of a token in the loss, 0 if it is not trained.
function weightOf(row, i) {
  if (row.labels[i] === IGNORED) return 0;
  return row.weights === null ? 1 : row.weights[i];
}

// A token that several documents train has the sum of their weights.
function meanWeight(row, i) {
  return weightOf(row, i) / Math.max(row.counts?.[i] ?? 1, 1);
}

// --- strips ---------------------------------------------------------------------------------------

// Draws the runs of tokens of one segment that have the same weight, from `x` and `y` on.
function drawSegment(row, segment, hatch, x, y = 0, height = 1) {
  const { start, stop } = segment;
  const group = element("g", { class: shade(row, segment) });
  const from = x - (start - row.start);
  const end = Math.min(stop - row.start, row.ids.length);
  for (let i = start - row.start; i < end; ) {
    const weight = meanWeight(row, i);
    let next = i + 1;
    while (next < end && meanWeight(row, next) === weight) next++;
    const run = element("rect", { x: from + i, y, width: next - i, height });
    run.setAttribute("class", weight > 0 ? "target" : "prompt");
    if (weight > 0) run.style.setProperty("--weight", weight / heaviest);
    if (shade(row, segment) === "pad") run.style.fill = `url(#${hatch})`;
    group.append(run);
    i = next;
  }
  for (const image of row.images) {
    if (image.start < start - row.start || image.stop > end) continue;
    const box = { x: from + image.start, y: y + 0.3 * height, height: 0.4 * height };
    group.append(element("rect", { ...box, width: image.stop - image.start, class: "image" }));
  }
  if (end < stop - row.start) {
    const first = Math.max(end, start - row.start);
    const rest = { x: from + first, y, height, class: "other", width: stop - row.start - first };
    group.append(element("rect", rest));
  }
  return group;
}

function boundary(x) {
  return element("path", { d: `M${x} 0V1`, class: "boundary" });
}

function strip(row, index) {
  const picture = element("svg", { viewBox: `0 0 ${widest} 1`, preserveAspectRatio: "none" });
  const hatch = `hatch${index}`;
  picture.append(hatching(hatch));
  for (const segment of row.segments) {
    // Branches hang below the top of their prefix.
    const y = Math.min(segment.level, 4) * 0.14;
    const group = drawSegment(row, segment, hatch, segment.start - row.start, y, 1 - y);
    const properties = segment.documents.flatMap((k) => row.documents[k].properties);
    group.dataset.properties = properties.join("|");
    picture.append(group);
    if (segment.stop < row.stop) picture.append(boundary(segment.stop - row.start));
  }
  const name = element("span", { class: "name" }, row.short);
  const button = element("button", { class: "strip", type: "button", "data-row": index });
  button.classList.toggle("first", row.start === 0 && data.rows.some((r) => r.start > 0));
  button.setAttribute("aria-label", `${row.name}: ${summary(row)}`);
  button.append(name, picture);
  button.addEventListener("click", () => select(index));
  const at = (event) => {
    const box = picture.getBoundingClientRect();
    const i = Math.floor(((event.clientX - box.left) / box.width) * widest);
    const inside = event.clientX >= box.left && i < row.ids.length;
    return inside ? showTip(row, i, event.clientX, box.bottom) : hideTip();
  };
  button.addEventListener("pointermove", at);
  button.addEventListener("pointerleave", hideTip);
  return button;
}

function hatching(id) {
  const size = { id, width: widest / 120, height: 1, patternUnits: "userSpaceOnUse" };
  const half = { x: 0, y: 0, width: size.width / 2, height: 1, fill: "var(--soft)" };
  const back = { ...half, width: size.width, fill: "var(--line)" };
  const pattern = element("pattern", size, element("rect", back), element("rect", half));
  return element("defs", {}, pattern);
}

function summary(row) {
  const tokens = row.stop - row.start;
  const real = row.documents.filter((d) => d.number !== null);
  const ofPadding = (s) => (shade(row, s) === "pad") * (s.stop - s.start);
  const padding = row.segments.reduce((n, s) => n + ofPadding(s), 0);
  const trained = real.reduce((n, d) => n + d.trained, 0);
  const less = (row.realTokens / (tokens - padding)).toFixed(1);
  return [
    `${count(real.length)} document${real.length === 1 ? "" : "s"}`,
    isShared(row) ? `${count(tokens - padding)} tokens instead of ${count(row.realTokens)} (${less}× fewer)`
      : `${count(tokens)}${data.capacity ? ` of ${count(data.capacity)}` : ""} tokens`,
    `${count(trained)} trained`,
    ...(padding ? [`${count(padding)} padding`] : []),
    ...(row.reason ? [row.reason] : []),
  ].join(" · ");
}

// --- one row --------------------------------------------------------------------------------------

let selected = 0;

function select(index) {
  selected = index;
  for (const button of document.querySelectorAll(".strip")) {
    button.setAttribute("aria-current", String(Number(button.dataset.row) === index));
  }
  const row = data.rows[index];
  byId("row-name").textContent = row.name;
  byId("row-summary").textContent = summary(row);
  byId("documents").replaceChildren(...row.segments.map((segment) => segmentText(row, segment)));
  drawTree(row);
  drawMask(row);
}

function segmentText(row, segment) {
  const { start, stop, documents, level } = segment;
  const text = element("div", { class: "tokens" });
  const end = Math.min(stop - row.start, row.ids.length);
  for (let i = start - row.start; i < end; ) {
    const image = imageAt(row, i);
    text.append(image ? picture(row, i, image) : token(row, i));
    i = image ? Math.min(image.stop, end) : i + 1;
  }
  if (end < stop - row.start) {
    const left = stop - row.start - Math.max(end, start - row.start);
    text.append(element("span", { class: "note" }, ` … ${count(left)} more tokens`));
  }
  const heads = documents.length === 1 ? [documentHead(row, documents[0], segment)]
    : documents.length ? sharedHeads(row, segment)
      : [head("padding", [`${count(stop - start)} tokens`])];
  const block = element("div", { class: `document ${shade(row, segment)}` }, ...heads, text);
  block.style.setProperty("--level", Math.min(level, 6));
  return block;
}

function head(name, facts) {
  return element("h3", {}, `${name} `, element("span", { class: "note" }, ` · ${facts.join(" · ")}`));
}

function documentHead(row, k, segment) {
  const d = row.documents[k];
  const tokens = inTokens(d.stop - d.start);
  if (d.number === null) return head("padding", [tokens, `${count(d.trained)} trained`]);
  const above = segment.position;
  const facts = [`row ${count(d.row)} of the data`];
  facts.push(above ? `${tokens}, ${count(above)} of them above` : tokens, `${count(d.trained)} trained`);
  if (d.ending !== null) facts.push(`ends in ${d.ending}`);
  const heading = head(`document ${count(d.number)}`, facts);
  for (const property of d.properties) {
    const more = property === "cut" ? ` from ${count(d.uncut)} tokens` : "";
    heading.append(element("span", { class: `mark ${property.replaceAll(" ", "-")}` }, ` · ${property}${more}`));
  }
  return heading;
}

// Names the documents of a shared segment, and those that end in it.
function sharedHeads(row, segment) {
  const { start, stop, position, documents } = segment;
  const last = position + stop - start;
  const positions = `positions ${count(position)} to ${count(last - 1)}`;
  const facts = [named(row, documents), inTokens(stop - start), positions];
  const ending = documents.filter((k) => row.documents[k].stop - row.documents[k].start === last);
  return [
    head(`shared by ${count(documents.length)} documents`, facts),
    ...ending.map((k) => {
      const heading = documentHead(row, k, segment);
      heading.prepend("ends here: ");
      return heading;
    }),
  ];
}

function named(row, documents) {
  const numbers = documents.map((k) => count(row.documents[k].number));
  return numbers.length > 8 ? `${numbers.slice(0, 7).join(", ")} and ${numbers.length - 7} more`
    : numbers.join(", ");
}

function token(row, i) {
  const weight = meanWeight(row, i);
  const text = data.texts[row.texts[i]];
  const shown = element("span", { class: "token", "data-token": i, tabindex: i ? -1 : 0 });
  shown.textContent = text === "" ? "·" : text.replaceAll("\n", "⏎\n");
  shown.classList.toggle("silent", text === "");
  if (weight > 0) {
    shown.classList.add("target");
    shown.style.setProperty("--weight", weight / heaviest);
    shown.classList.toggle("weighted", weight !== 1);
  }
  return shown;
}

const imageAt = (row, i) => row.images.find((image) => image.start <= i && i < image.stop);

// Names an image in place of its tokens.
function picture(row, i, image) {
  const shown = token(row, i);
  shown.classList.add("picture");
  shown.textContent = `image of ${image.size}, ${count(image.stop - image.start)} tokens`;
  return shown;
}

// --- the tree -------------------------------------------------------------------------------------

const LANE = 12; // pixels of a line of the tree

// Draws a line for each document with tokens of its own, at their positions, below its prefix.
function drawTree(row) {
  byId("tree").hidden = !isShared(row);
  if (!isShared(row)) return;
  const real = row.segments.filter((s) => s.documents.length);
  const longest = Math.max(...real.map((s) => s.position + s.stop - s.start));
  const first = new Set(real.map((s) => s.documents[0]));
  const lanes = new Map([...first].map((k, lane) => [k, lane]));
  const picture = element("svg", { viewBox: `0 0 ${longest} ${lanes.size}`, preserveAspectRatio: "none" });
  picture.style.height = `${lanes.size * LANE}px`;
  const laneOf = (segment) => lanes.get(segment.documents[0]);
  for (const segment of real) {
    const lane = laneOf(segment);
    const group = drawSegment(row, segment, "", segment.position, lane + 0.12, 0.76);
    group.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      const at = Math.floor(((event.clientX - box.left) / box.width) * longest) - segment.position;
      const i = segment.start + Math.max(0, Math.min(at, segment.stop - segment.start - 1));
      if (i < row.ids.length) showTip(row, i, event.clientX, event.clientY);
    });
    picture.append(group);
    const parent = segment.parent === null ? lane : laneOf(row.segments[segment.parent]);
    if (parent !== lane) {
      const fork = element("path", { d: `M${segment.position} ${parent + 0.88}V${lane + 0.88}`, class: "fork" });
      picture.append(fork);
    }
  }
  picture.addEventListener("pointerleave", hideTip);
  const words = "A line for each document: its own tokens at their positions, below the tokens that it " +
    "shares (gray). Shared tokens are computed once.";
  byId("tree").replaceChildren(element("p", { class: "note" }, words), picture);
}

// --- the mask -------------------------------------------------------------------------------------

function drawMask(row) {
  const size = row.stop - row.start;
  const picture = element("svg", { viewBox: `0 0 ${size} ${size}`, role: "img" });
  const shape = isShared(row) ? "each segment sees its path" : "one triangle for each document";
  picture.setAttribute("aria-label", `attention mask: ${shape}`);
  for (const segment of row.segments) {
    const [a, b] = [segment.start - row.start, segment.stop - row.start];
    const hue = `${shade(row, segment)} target`;
    for (const before of pathOf(row, segment).slice(0, -1)) {
      const box = { x: before.start, y: a, width: before.stop - before.start, height: b - a };
      picture.append(element("rect", { ...box, class: hue }));
    }
    picture.append(element("polygon", { points: `${a},${a} ${a},${b} ${b},${b}`, class: hue }));
  }
  picture.append(element("path", { id: "sees", class: "sees", d: "" }));
  const of = `tokens ${count(row.start)} to ${count(row.stop)} of the micro-batch`;
  const cut = row.segments.map((s) => count(s.start)).concat(count(row.stop));
  const shown = cut.length > 12 ? [...cut.slice(0, 11), "…", cut.at(-1)] : cut;
  const sees = isShared(row) ? "A token sees the tokens before it in its documents, and nothing else."
    : "A token sees the tokens before it in its document, and nothing else.";
  byId("mask").replaceChildren(
    picture,
    element("p", { class: "note" }, `Rows are queries, columns keys: ${of}. ${sees}`),
    element("p", {}, `cu_seqlens: ${shown.join(" ")}`),
  );
}

// Marks the tokens that a token sees, and the later ones that see it.
function markMask(row, i) {
  const line = byId("sees");
  if (!line || row !== data.rows[selected]) return;
  const segment = segmentAt(row, i);
  const path = pathOf(row, segment).slice(0, -1);
  const before = path.map((s) => `M${s.start - row.start} ${i + 0.5}H${s.stop - row.start}`);
  const later = row.segments
    .filter((s) => s !== segment && pathOf(row, s).includes(segment))
    .map((s) => `M${i + 0.5} ${s.start - row.start}V${s.stop - row.start}`);
  const [start, stop] = [segment.start - row.start, segment.stop - row.start];
  const own = `M${start} ${i + 0.5}H${i + 0.5}V${stop}`;
  line.setAttribute("d", [...before, own, ...later].join(""));
}

// --- one token ------------------------------------------------------------------------------------

function facts(row, i) {
  const segment = segmentAt(row, i);
  const image = imageAt(row, i);
  const [id, label] = [row.ids[i], row.labels[i]];
  const text = data.texts[row.texts[i]];
  const target = label === id ? "the id, trained" : "trained";
  const trainedBy = row.counts?.[i] ?? 1;
  const ofMany = trainedBy > 1 ? `, the sum over ${count(trainedBy)} documents that have it here` : "";
  const boundary = `tokens ${count(segment.start)} to ${count(segment.stop)}`;
  return [
    ["text", text === "" ? "a part of the next character" : JSON.stringify(text)],
    ["id", id],
    ["position", count(row.positions[i])],
    ["label", `${label} (${label === IGNORED ? untrained(row, segment, i) : target})`],
    ["weight", `${weightOf(row, i)}${ofMany}`],
    ...(image ? [["image", `${image.size} pixels, ${count(image.stop - image.start)} tokens`]] : []),
    holders(row, segment),
    ["boundary", `${boundary}; this is ${count(row.start + i)}`],
  ];
}

function untrained(row, segment, i) {
  if (row.start + i !== segment.start) return "not trained";
  if (segment.parent === null) return "first of its document, never a target";
  return segment.repeats ? "a copy for this branch, a target only where it stands first" : "not trained";
}

// Names the document of a token, or the documents that share it.
function holders(row, segment) {
  const real = segment.documents.map((k) => row.documents[k]).filter((d) => d.number !== null);
  if (real.length > 1) return ["shared by", `${count(real.length)} documents: ${named(row, segment.documents)}`];
  const words = real.map((d) => `${count(d.number)}, row ${count(d.row)} of the data`);
  return ["document", words[0] ?? "padding"];
}

function showTip(row, i, x, y) {
  const list = element("dl");
  for (const [name, value] of facts(row, i)) {
    list.append(element("dt", {}, name), element("dd", {}, String(value)));
  }
  const tip = byId("tip");
  tip.replaceChildren(list);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const below = y + 8 + height < window.innerHeight;
  tip.style.left = `${Math.max(8, Math.min(x, window.innerWidth - width - 8))}px`;
  tip.style.top = `${below ? y + 8 : Math.max(8, y - height - 36)}px`;
  markMask(row, i);
}

function hideTip() {
  byId("tip").hidden = true;
  byId("sees")?.setAttribute("d", "");
  document.querySelector(".token.here")?.classList.remove("here");
}

function point(shown) {
  hideTip();
  if (!shown) return;
  const { left, bottom } = shown.getBoundingClientRect();
  shown.classList.add("here");
  showTip(data.rows[selected], Number(shown.dataset.token), left, bottom);
}

// --- the page -------------------------------------------------------------------------------------

function filter(property, pressed) {
  for (const button of byId("filters").children) {
    button.setAttribute("aria-pressed", String(button === pressed));
  }
  const shown = [];
  document.querySelectorAll(".strip").forEach((button, index) => {
    const holds = (d) => d.properties.includes(property);
    button.hidden = property !== "" && !data.rows[index].documents.some(holds);
    button.style.display = button.hidden ? "none" : "";
    if (!button.hidden) shown.push(index);
    for (const group of button.querySelectorAll("g")) {
      const has = group.dataset.properties.split("|").includes(property);
      group.classList.toggle("dim", property !== "" && !has);
    }
  });
  if (!shown.includes(selected)) select(shown[0]);
}

function addFilters() {
  const choices = [["", "all rows", data.rows.length]];
  for (const property of data.properties) {
    const holds = (row) => row.documents.some((d) => d.properties.includes(property));
    choices.push([property, property, data.rows.filter(holds).length]);
  }
  for (const [property, name, number] of choices) {
    const button = element("button", { type: "button", "aria-pressed": property === "" });
    button.textContent = `${name} (${count(number)})`;
    button.disabled = number === 0;
    button.addEventListener("click", () => filter(property, button));
    byId("filters").append(button);
  }
}

addFilters();
byId("strips").append(...data.rows.map(strip));
select(0);

const texts = byId("documents");
const tokenAt = (event) => event.target.closest?.(".token");
texts.addEventListener("pointerover", (event) => point(tokenAt(event)));
texts.addEventListener("pointerleave", hideTip);
texts.addEventListener("click", (event) => tokenAt(event)?.focus({ preventScroll: true }));
texts.addEventListener("focusin", (event) => point(tokenAt(event)));
texts.addEventListener("focusout", hideTip);
texts.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const all = [...texts.querySelectorAll(".token")];
  const next = all[all.indexOf(document.activeElement) + step];
  if (!step || !next) return;
  event.preventDefault();
  document.activeElement.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
