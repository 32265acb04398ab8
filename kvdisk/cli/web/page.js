'use strict';
// All text of a store goes into the page as text, never as markup.
const WORDS = JSON.parse(document.getElementById('words').textContent);
const byId = id => document.getElementById(id);

// -- numbers in words, as kvdisk.cli.output has them --

const say = {
  number: count => count == null ? '?' : Math.round(count).toLocaleString('en-US'),
  size(bytes) {
    if (bytes == null) return '?';
    if (bytes < 1024) return `${bytes} B`;
    const names = ['KiB', 'MiB', 'GiB', 'TiB', 'PiB'];
    let value = bytes / 1024, at = 0;
    while (value >= 1024 && at < names.length - 1) { value /= 1024; at += 1; }
    return `${value.toFixed(1)} ${names[at]}`;
  },
  share(fraction) {
    if (fraction == null) return '?';
    if (fraction > 0 && fraction < 0.01) return '<1 %';
    return `${fraction >= 0.99 && fraction < 1 ? 99 : Math.round(fraction * 100)} %`;
  },
  speed(rate) {
    if (rate == null) return '?';
    if (rate < 1) return '-';
    const [unit, name] = [[1e9, 'GB'], [1e6, 'MB'], [1e3, 'kB'], [1, 'B']].find(([each]) => rate >= 0.9995 * each || each === 1);
    const count = rate / unit;
    return unit > 1 && count < 99.95 ? `${count.toFixed(1)} ${name}/s` : `${Math.round(count).toLocaleString('en-US')} ${name}/s`;
  },
  duration(seconds) {
    const left = Math.max(0, Math.trunc(seconds));
    if (left > 365 * 86400) return 'more than a year';
    const units = [['d', 86400], ['h', 3600], ['min', 60], ['s', 1]];
    for (let at = 0; at < 3; at += 1) {
      const [unit, long] = units[at], [part, short] = units[at + 1];
      if (left >= long) {
        const rest = Math.trunc(left % long / short);
        return `${Math.trunc(left / long)} ${unit}${rest ? ` ${rest} ${part}` : ''}`;
      }
    }
    return `${left} s`;
  },
  plural: (count, noun) => `${say.number(count)} ${noun}${count === 1 ? '' : 's'}`,
  rate: count => count == null ? '?' : count >= 9.95 || count === 0 ? `${say.number(count)}/s` : `${count.toFixed(1)}/s`,
  clock: seconds => new Date(seconds * 1000).toLocaleTimeString('en-GB'),
  model: name => name == null ? '?' : name.split('/').length > 3 ? `…/${name.split('/').slice(-2).join('/')}` : name,
};

// -- elements --

function make(name, attributes = {}, ...inside) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...inside);
  return node;
}

function draw(name, attributes = {}, ...inside) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...inside);
  return node;
}

function put(node, text) {  // changes only what differs: a selection, and a screen reader's place, stay
  if (node.textContent !== text) node.textContent = text;
}

// One row for each key, in this order. `fill(row, value)` writes into a row that `build()` made.
function rows(body, keys, build, fill) {
  const known = new Map([...body.children].filter(row => row.dataset.key).map(row => [row.dataset.key, row]));
  let place = 0;
  for (const key of keys) {
    let row = known.get(key);
    known.delete(key);
    if (!row) { row = build(); row.dataset.key = key; }
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] || null);
    fill(row, key);
    place += 1;
    if (row.after_) {
      if (body.children[place] !== row.after_) body.insertBefore(row.after_, body.children[place] || null);
      place += 1;
    }
  }
  for (const row of known.values()) { if (row.after_) row.after_.remove(); row.remove(); }
}

function cells(labels, numbers) {
  const row = make('tr', {role: 'row'});
  labels.forEach((label, at) => row.append(make('td', {role: 'cell', 'data-label': label, class: numbers[at] ? 'n' : ''})));
  return row;
}

// -- charts --

const DASHES = ['', '7 4', '1.5 4'];
const LEFT = 64, RIGHT = 4, TOP = 8, BOTTOM = 20, HEIGHT = 132;

// The least of 1, 2, 2.5, 5, 10, ... that is not below a value: an axis ends there, and its half is round, too.
function rounded(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 2, 2.5, 5, 10].find(each => each * unit >= value * 0.999999);
}

class Chart {
  // `curves(points)`: [{name, look, of}], where `of(point)` is the value. `most`: of the axis; else of the values.
  constructor(title, curves, {format, most = null, least = 1}) {
    Object.assign(this, {title, curves, format, most, least, points: [], at: null, whole: 600});
    this.keys = make('span', {class: 'keys'});
    this.svg = draw('svg', {'aria-hidden': 'true', focusable: 'false'});
    this.plot = make('div', {class: 'plot', tabindex: '0', role: 'slider', 'aria-label': `${title}: moment`, 'aria-valuemin': '0'}, this.svg);
    this.moment = make('span', {class: 'moment', 'aria-hidden': 'true'});
    this.figure = make('figure', {}, make('figcaption', {}, make('b', {}, title), this.keys, this.moment), this.plot);
    this.plot.addEventListener('keydown', event => this.key(event));
    this.plot.addEventListener('pointermove', event => this.point(event));
    for (const ends of ['pointerleave', 'blur']) this.plot.addEventListener(ends, () => { this.at = null; this.show(); });
    new ResizeObserver(() => this.show()).observe(this.plot);
  }

  key(event) {
    const last = this.points.length - 1;
    const now = this.at == null ? last : this.at;
    const to = {ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1,
      PageUp: now + 10, PageDown: now - 10, Home: 0, End: last}[event.key];
    if (event.key === 'Escape') this.at = null;
    else if (to === undefined || last < 0) return;
    else this.at = this.at == null && event.key !== 'Home' ? last : Math.min(last, Math.max(0, to));
    event.preventDefault();
    this.show();
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const time = this.end - this.whole * (1 - (event.clientX - box.left - LEFT) / Math.max(1, box.width - LEFT - RIGHT));
    let best = null;
    this.points.forEach((point, at) => {
      if (best == null || Math.abs(point.time_s - time) < Math.abs(this.points[best].time_s - time)) best = at;
    });
    this.at = best;
    this.show();
  }

  take(points, whole, end) {
    const kept = this.at == null ? null : this.points[this.at];
    Object.assign(this, {points, whole, end});
    this.at = kept ? points.findIndex(point => point.number === kept.number) : null;
    if (this.at === -1) this.at = null;
    this.show();
  }

  show() {
    const width = Math.max(160, this.plot.clientWidth), used = this.curves.filter(curve => this.points.some(point => curve.of(point) != null));
    const high = this.most ?? rounded(Math.max(this.least, ...used.flatMap(curve => this.points.map(point => curve.of(point) ?? 0))));
    const x = time => LEFT + (width - LEFT - RIGHT) * (1 - (this.end - time) / this.whole);
    const y = value => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / high);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const level = Math.round(y(high * share)) + 0.5;
      parts.push(draw('line', {class: 'grid', x1: LEFT, x2: width, y1: level, y2: level}));
      parts.push(draw('text', {x: LEFT - 8, y: level + 4, 'text-anchor': 'end'}, share ? this.format(high * share) : '0'));
    }
    parts.push(draw('text', {x: LEFT, y: HEIGHT - 5}, `${say.duration(this.whole)} ago`),
      draw('text', {x: width, y: HEIGHT - 5, 'text-anchor': 'end'}, 'now'));
    for (const curve of used) parts.push(draw('path', {class: `curve ${curve.look}`, 'stroke-dasharray': curve.dash, d: this.line(curve, x, y)}));
    const chosen = this.at == null ? null : this.points[this.at];
    if (chosen) {
      parts.push(draw('line', {class: 'cursor', x1: x(chosen.time_s), x2: x(chosen.time_s), y1: TOP, y2: HEIGHT - BOTTOM}));
      for (const curve of used) {
        const value = curve.of(chosen);
        if (value != null) parts.push(draw('circle', {class: `dot ${curve.look}`, cx: x(chosen.time_s), cy: y(value), r: 3}));
      }
    }
    this.svg.replaceChildren(...parts);
    this.tell(used, chosen);
  }

  // A gap where nothing is known: no value, or no look for a while.
  line(curve, x, y) {
    const usual = [...this.points].map(point => point.seconds).sort((a, b) => a - b)[this.points.length >> 1] || 1;
    let d = '', is_on = false;
    for (const point of this.points) {
      const value = curve.of(point);
      if (value == null) { is_on = false; continue; }
      if (is_on && point.seconds > 20 * usual) is_on = false;
      d += `${is_on ? 'L' : 'M'}${x(point.time_s).toFixed(1)} ${y(value).toFixed(1)}`;
      if (!is_on) d += 'h0.01';
      is_on = true;
    }
    return d;
  }

  tell(used, chosen) {
    const last = this.points[this.points.length - 1], point = chosen || last;
    const value = curve => { const found = point ? curve.of(point) : null; return found == null ? '-' : this.format(found); };
    const shown = used.length ? used : this.curves.slice(0, 1);
    if (this.keys.children.length !== shown.length || [...this.keys.children].some((key, at) => key.dataset.name !== shown[at].name)) {
      this.keys.replaceChildren(...shown.map(curve => make('span', {'data-name': curve.name},
        draw('svg', {class: curve.look, viewBox: '0 0 24 8', 'aria-hidden': 'true'},
          draw('path', {class: 'curve', d: 'M0 4H24', 'stroke-dasharray': curve.dash})), curve.name, make('b'))));
    }
    shown.forEach((curve, at) => put(this.keys.children[at].lastChild, value(curve)));
    const said = point ? `${say.clock(point.time_s)}: ${shown.map(curve => `${curve.name} ${value(curve)}`).join(', ')}` : 'nothing yet';
    put(this.moment, chosen ? `at ${say.clock(chosen.time_s)}` : '');
    this.plot.setAttribute('aria-valuemax', String(Math.max(0, this.points.length - 1)));
    this.plot.setAttribute('aria-valuenow', String(this.at ?? Math.max(0, this.points.length - 1)));
    this.plot.setAttribute('aria-valuetext', said);
  }
}

const sum = (point, routes) => routes.reduce((all, route) => all + (point.bytes_per_s[route] || 0), 0);
const curve = (name, look, at, of) => ({name, look, dash: DASHES[at], of});
const has_remote = () => state.frame && state.frame.engines.some(engine => engine.remote);
const CHARTS = [
  new Chart('Hits', [
    ...WORDS.kept.map((tier, at) => curve(WORDS.tiers[tier], tier, at, point => point.hit_rate[tier])),
    curve(WORDS.tiers.remote, 'remote', 2, point => point.hit_rate.remote)], {format: say.share, most: 1}),
  new Chart('NVMe', [curve('read', 'in', 0, point => sum(point, WORDS.reads)), curve('written', 'out', 1, point => sum(point, WORDS.writes))],
    {format: say.speed, least: 1000}),
  new Chart('GPU and memory', [
    curve('to the GPU', 'in', 0, point => point.bytes_per_s.cpu_to_gpu), curve('to memory', 'out', 1, point => point.bytes_per_s.gpu_to_cpu)],
    {format: say.speed, least: 1000}),
  new Chart('Fill', WORDS.kept.map((tier, at) => curve(WORDS.tiers[tier], tier, at, point => point.fill[tier])), {format: say.share, most: 1}),
  new Chart('Evicted blocks', WORDS.kept.map((tier, at) => curve(WORDS.tiers[tier], tier, at, point => point.evicted_per_s[tier])),
    {format: say.rate, least: 1}),
];
const REMOTE = new Chart('Remote store', [
  curve('read', 'in', 0, point => point.bytes_per_s.remote_to_cpu), curve('sent', 'out', 1, point => point.bytes_per_s.cpu_to_remote)],
  {format: say.speed, least: 1000});

// -- what the last look found --

const state = {span: 'minutes', points: [], began: null, frame: null, at: 0, number: -1, interval: 2, problem: '', failed: null};

function tile(key, title, value, more, fill, look) {
  let place = byId('tiles').querySelector(`[data-key="${key}"]`);
  if (!place) {
    place = make('div', {'data-key': key}, make('dt', {}, title),
      make('dd', {}, make('div', {class: 'value'}), ...(fill === undefined ? [] : [make('div', {class: `bar ${look}`, 'aria-hidden': 'true'}, make('i'))]),
        make('div', {class: 'more'})));
    byId('tiles').append(place);
  }
  put(place.querySelector('.value'), value);
  put(place.querySelector('.more'), more);
  if (fill !== undefined) place.querySelector('.bar i').style.width = `${100 * Math.min(1, fill)}%`;
}

function show_tiles(totals) {
  tile('engines', 'Engines', say.number(totals.engines), totals.stopped ? `and ${totals.stopped} stopped` : 'in use');
  tile('hits', 'Tokens that hit', totals.hit_rate == null ? '-' : say.share(totals.hit_rate),
    totals.lookup_tokens ? `of ${say.number(totals.lookup_tokens)} asked for` : 'none asked for yet');
  tile('saved', 'Computing saved', totals.saved_seconds ? `~${say.duration(totals.saved_seconds)}` : '-', 'since the starts');
  for (const tier of WORDS.kept) {
    const used = totals.used_bytes[tier], most = totals.capacity_bytes[tier];
    if (most) tile(`fill-${tier}`, `${WORDS.tiers[tier]} full`, say.share(used / most), `${say.size(used)} of ${say.size(most)}`, used / most, tier);
    else byId('tiles').querySelector(`[data-key="fill-${tier}"]`)?.remove();
  }
}

const counted = (counts, words) => Object.entries(counts).map(([name, count]) => `${say.number(count)} ${words[name]}`).join(', ');

function engine_state(engine) {
  if (engine.problem) return ['✗ figures unreadable', 'bad'];
  if (engine.figures_s == null) return ['○ no figures yet', 'dim'];
  if (Object.keys(engine.failures).length) return [`✗ ${counted(engine.failures, WORDS.failures)}`, 'bad'];
  return engine.idle ? ['○ idle', 'dim'] : ['✓ fine', 'good'];
}

function hits(tier) {
  if (!tier) return '-';
  const [now, ever] = [tier.hit_rate_now, tier.hit_rate].map(rate => rate == null ? '-' : say.share(rate));
  return `${now} (${ever})`;
}

const flow = (engine, routes) => engine.bytes_per_s == null ? null : routes.reduce((all, route) => all + engine.bytes_per_s[route], 0);

function engine_row() {
  const row = cells(['Engine', 'State', 'CPU hits', 'NVMe hits', 'NVMe full', 'From NVMe', 'To NVMe', 'Up'], [0, 0, 1, 1, 1, 1, 1, 1]);
  const opens = make('button', {type: 'button', class: 'opens', 'aria-expanded': 'false'}, make('span', {class: 'name'}));
  row.cells[0].append(opens, make('small', {class: 'model'}));
  const inside = make('dl');
  const after = make('tr', {class: 'details', role: 'row', hidden: ''}, make('td', {colspan: '8', role: 'cell'}, inside));
  row.after_ = after;
  opens.addEventListener('click', () => {
    after.hidden = !after.hidden;
    opens.setAttribute('aria-expanded', String(!after.hidden));
  });
  return row;
}

function show_engine(row, engine) {
  const [state_words, look] = engine_state(engine), nvme = engine.tiers.nvme;
  put(row.querySelector('.name'), engine.engine_store.slice(0, 8));
  put(row.querySelector('.model'), say.model(engine.model) + (engine.data_parallel_rank == null ? '' : `, DP ${engine.data_parallel_rank}`));
  row.querySelector('.opens').setAttribute('aria-label', `${engine.engine_store.slice(0, 8)}, details`);
  const known = engine.figures_s != null;
  const texts = [state_words, hits(engine.tiers.cpu), hits(nvme), nvme ? say.share(nvme.used_bytes / nvme.capacity_bytes) : '-',
    known ? say.speed(flow(engine, WORDS.reads)) : '-', known ? say.speed(flow(engine, WORDS.writes)) : '-',
    known ? say.duration(state.frame.time_s - engine.started_s) : '-'];
  texts.forEach((text, at) => {
    const cell = row.cells[at + 1];
    if (!cell.firstChild) cell.append(make('span'));
    put(cell.firstChild, text);
  });
  row.cells[1].firstChild.className = look;
  if (!row.after_.hidden || !row.after_.querySelector('dt')) show_details(row.after_.querySelector('dl'), engine);
}

function show_details(list, engine) {
  const facts = [];
  if (engine.problem) facts.push(['Figures', engine.problem]);
  if (engine.figures_s != null) {
    facts.push(['Process', `pid ${engine.pid} on ${engine.host}, ${say.plural(engine.ranks, 'rank')}`]);
    if (engine.reset_s != null) facts.push(['Reset', `${say.duration(state.frame.time_s - engine.reset_s)} ago: serves nothing stored before`]);
    if (engine.idle) facts.push(['Idle for', say.duration(state.frame.time_s - engine.figures_s)]);
    for (const [name, tier] of Object.entries(engine.tiers)) {
      facts.push([WORDS.tiers[name], `${say.size(tier.used_bytes)} of ${say.size(tier.capacity_bytes)}, evicts ${say.rate(tier.evicted_blocks_per_s)}`]);
    }
    if (engine.remote) facts.push(['Remote store', engine.remote.paused ? '✗ does not answer'
      : `hits ${hits(engine.remote)}, sent ${say.plural(engine.remote.sent_blocks, 'block')}`]);
    for (const [route, rate] of Object.entries(engine.bytes_per_s || {})) if (rate >= 1) facts.push([WORDS.routes[route], say.speed(rate)]);
    const jobs = Object.entries(engine.waiting.jobs).filter(([, count]) => count).map(([job, count]) => `${job} ${say.number(count)}`);
    const waits = Object.entries(WORDS.waiting).filter(([name]) => engine.waiting[name]).map(([name, what]) => `${say.number(engine.waiting[name])} ${what}`);
    facts.push(['Jobs', [...jobs, ...waits].join(', ') || 'none']);
    if (engine.waiting.write_budget_bytes != null) facts.push(['May write now', say.size(engine.waiting.write_budget_bytes)]);
    if (Object.keys(engine.harmless).length) facts.push(['No fault', counted(engine.harmless, WORDS.harmless)]);
  }
  if (!facts.length) facts.push(['Figures', 'it has written none yet']);
  const texts = facts.flat();
  if (list.children.length !== texts.length) list.replaceChildren(...texts.map((_, at) => make(at % 2 ? 'dd' : 'dt')));
  texts.forEach((text, at) => put(list.children[at], text));
}

function show_frame(frame, departed) {
  put(byId('store'), frame.store.path);
  document.title = `kvdisk ${frame.store.path}`;
  show_tiles(frame.totals);
  const engines = new Map(frame.engines.map(engine => [engine.engine_store, engine]));
  const wrong = engine => Boolean(engine.problem || Object.keys(engine.failures).length);
  const order = [...frame.engines].sort((one, other) => wrong(other) - wrong(one)).map(engine => engine.engine_store);
  rows(byId('engines').tBodies[0], order, engine_row, (row, key) => show_engine(row, engines.get(key)));
  byId('engines').hidden = !order.length;
  byId('engines-none').hidden = Boolean(order.length);
  show_drives(frame.drives);
  const left = Object.entries(WORDS.departures).filter(([series]) => frame.totals.departures[series]);
  counts('departures', left, 'part', ([series]) => [say.number(frame.totals.departures[series]), say.rate(departed[series] ?? null)]);
  const misses = Object.entries(frame.totals.misses), all = misses.reduce((whole, [, count]) => whole + count, 0);
  counts('misses', misses.map(([name, count]) => [name, WORDS.misses[name], count]), '', ([, , count]) => [say.number(count), say.share(count / all)]);
  const stopped = frame.stopped;
  byId('stopped').hidden = !stopped.length;
  rows(byId('stopped').querySelector('ul'), stopped.slice(0, 50).map(one => one.engine_store), () => make('li'), (row, key) => {
    const one = stopped.find(each => each.engine_store === key);
    put(row, `${key.slice(0, 8)}  ${one.last_use_s == null ? 'HOME cannot be read' : `${say.model(one.model)}, last used ${say.duration(frame.time_s - one.last_use_s)} ago`}`);
  });
}

function show_drives(drives) {
  const known = new Map(drives.map(drive => [drive.path, drive]));
  const labels = ['Drive', 'State', 'Read now', 'Written now', 'Read', 'Written', 'Engines'];
  rows(byId('drives').tBodies[0], [...known.keys()], () => cells(labels, [0, 0, 1, 1, 1, 1, 1]), (row, key) => {
    const drive = known.get(key);
    const texts = [drive.path, drive.quarantined ? `✗ not used by ${drive.quarantined} of ${drive.engines}` : '✓ fine',
      say.speed(drive.read_bytes_per_s), say.speed(drive.written_bytes_per_s), say.size(drive.read_bytes), say.size(drive.written_bytes), say.number(drive.engines)];
    texts.forEach((text, at) => {
      if (!row.cells[at].firstChild) row.cells[at].append(make('span'));
      put(row.cells[at].firstChild, text);
    });
    row.cells[1].firstChild.className = drive.quarantined ? 'bad' : 'good';
  });
  byId('drives').hidden = !drives.length;
  byId('drives-none').hidden = Boolean(drives.length);
}

// A table of counts by name. `found`: [key, words, ...].
function counts(id, found, part, values) {
  const known = new Map(found.map(each => [each[0], each]));
  rows(byId(id).tBodies[0], [...known.keys()], () => {
    const row = make('tr', {}, make('td'), make('td', {class: 'n'}), make('td', {class: 'n'}));
    row.cells[0].append(make('span'));
    return row;
  }, (row, key) => {
    const each = known.get(key);
    put(row.cells[0].firstChild, each[1]);
    if (part && each[1].startsWith('of ')) row.cells[0].firstChild.className = part;
    values(each).forEach((text, at) => put(row.cells[at + 1], text));
  });
  byId(id).hidden = !found.length;
  byId(`${id}-none`).hidden = Boolean(found.length);
}

// -- asking again and again --

function show_state() {
  const age = state.frame ? Math.max(0, state.now - state.frame.time_s + (performance.now() - state.at) / 1000) : null;
  const bad = state.failed || state.problem;
  document.querySelector('.state').classList.toggle('bad', Boolean(bad));
  put(byId('mark'), bad ? '✗' : state.frame ? '●' : '○');
  put(byId('live'), bad || (state.frame ? 'Live' : 'Connecting'));
  put(byId('age'), age == null ? '' : bad ? `Shown as of ${say.duration(age)} ago.` : age > 2 * state.interval + 3 ? `· looked ${say.duration(age)} ago` : '');
  const problems = state.frame ? state.frame.problems : [];
  byId('problems').hidden = !problems.length;
  rows(byId('problems').querySelector('ul'), problems, () => make('li'), (row, key) => put(row, key));
}

function show_charts() {
  const whole = WORDS.spans[state.span];
  const end = state.frame ? state.frame.time_s : Date.now() / 1000;
  const shown = has_remote() ? [...CHARTS, REMOTE] : CHARTS;
  if (byId('charts').children.length !== shown.length) byId('charts').replaceChildren(...shown.map(chart => chart.figure));
  for (const chart of shown) chart.take(state.points, whole, end);
}

function take(found) {
  if (state.began !== found.began_s) state.points = [];  // another process than before
  const last = state.points.length ? state.points[state.points.length - 1].number : -1;
  state.points.push(...found.points.filter(point => point.number > last));
  Object.assign(state, {began: found.began_s, frame: found.frame, now: found.now_s, at: performance.now(),
    interval: found.interval_s, problem: found.problem, failed: null});
  const oldest = found.now_s - WORDS.spans[state.span];
  const newest = found.frame ? found.frame.time_s : Infinity;  // a clock may be put back
  state.points = state.points.filter(point => point.time_s >= oldest && point.time_s <= newest);
  if (found.frame && found.number !== state.number) show_frame(found.frame, found.departed_per_s);
  state.number = found.number;
  show_charts();
}

let timer = null, asking = false;

async function ask() {
  clearTimeout(timer);
  if (asking || document.hidden) return;
  asking = true;
  const span = state.span, last = state.points.length ? state.points[state.points.length - 1].number : -1;
  try {
    const answer = await fetch(`figures.json?span=${span}&after=${last}`, {signal: AbortSignal.timeout(20000), cache: 'no-store'});
    if (!answer.ok) throw new Error(await answer.text());
    const found = await answer.json();
    if (span === state.span) take(found);
  } catch (error) {
    const is_gone = error instanceof TypeError || error.name === 'TimeoutError';
    state.failed = is_gone ? 'kvdisk web does not answer.' : error.message;
  }
  asking = false;
  show_state();
  timer = setTimeout(ask, span === state.span ? 1000 * Math.max(1, state.interval) : 0);
}

document.addEventListener('visibilitychange', ask);
for (const radio of document.querySelectorAll('input[name="span"]')) {
  radio.addEventListener('change', () => { state.span = radio.value; state.points = []; show_charts(); ask(); });
}
setInterval(() => { if (!document.hidden) show_state(); }, 1000);

// -- a prompt's path --

const STATES = {hit: 'would hit', here: 'stored, but would not hit', missing: 'not stored', rest: 'beyond the last whole block'};

function path_picture(answer) {
  const said = answer.path.slice(0, 12).map(each => `tokens ${say.number(each.start_tokens)} to ${say.number(each.end_tokens)} ${STATES[each.state]}`);
  const bar = make('div', {class: 'path', role: 'img', 'aria-label': said.join('; ')});
  let drawn = 0;
  for (const each of answer.path) {
    const share = (each.end_tokens - drawn) / answer.prompt_tokens;
    if (share < 0.0005 && each.end_tokens < answer.prompt_tokens) continue;  // narrower than can be seen: many would be slow
    const part = make('i', {class: `s-${each.state}`});
    part.style.width = `${100 * share}%`;
    bar.append(part);
    drawn = each.end_tokens;
  }
  const kinds = [...new Set(answer.path.map(each => each.state))];
  const sums = kind => answer.path.reduce((all, each) => all + (each.state === kind ? each.end_tokens - each.start_tokens : 0), 0);
  return [bar, make('ul', {class: 'keys'}, ...kinds.map(kind => make('li', {}, make('i', {class: `s-${kind}`}),
    `${say.plural(sums(kind), 'token')} ${STATES[kind]}`)))];
}

function show_answer(answer) {
  const {found} = answer, facts = [];
  const line = text => make('p', {}, text);
  for (const reset of answer.resets) {
    facts.push(line(`Engine store ${reset.engine_store.slice(0, 8)} was reset: of what it has stored since, ${say.plural(reset.hit_tokens, 'token')} would hit.`));
  }
  if (answer.elsewhere.length) {
    facts.push(line('Other namespaces have more of it:'), make('ul', {}, ...answer.elsewhere.map(other => make('li', {},
      `${other.fingerprint.slice(0, 8)}  ${say.model(other.model)}: ${say.plural(other.hit_tokens, 'token')}. ${
        other.differs == null ? 'One of the two does not list its fields.'
          : `Differs in ${Object.entries(other.differs).map(([name, [there, here]]) => `${name} (${here}, and ${there} here)`).join('; ')}.`}`))));
  }
  for (const problem of answer.problems) facts.push(make('p', {class: 'bad'}, `✗ ${problem}`));
  const ends = answer.ends[0].toUpperCase() + answer.ends.slice(1);
  byId('answer').replaceChildren(
    make('p', {class: 'verdict'}, `${say.number(found.hit_tokens)} of ${say.number(answer.prompt_tokens)} prompt tokens would hit`),
    ...path_picture(answer), line(`${ends}.`),
    line(`Namespace ${found.fingerprint.slice(0, 8)}, ${say.model(found.model)}, ${found.in_use ? 'in use' : 'of stopped engines'}; blocks of ${say.plural(found.block_tokens, 'token')}.`),
    ...facts);
}

byId('why').addEventListener('submit', async event => {
  event.preventDefault();
  const button = event.target.querySelector('button');
  if (button.getAttribute('aria-disabled') === 'true') return;
  button.setAttribute('aria-disabled', 'true');  // and not disabled: it keeps the place of who types
  byId('answer').replaceChildren(make('p', {class: 'about'}, 'Reading the indexes'));
  try {
    const question = {tokens: byId('tokens').value, namespace: byId('namespace').value.trim(), salt: byId('salt').value};
    const answer = await fetch('why', {method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(question)});
    if (!answer.ok) throw new Error(await answer.text());
    show_answer(await answer.json());
  } catch (error) {
    const said = error instanceof TypeError ? 'kvdisk web does not answer.' : error.message;
    byId('answer').replaceChildren(make('p', {class: 'bad'}, `✗ ${said}`));
  }
  button.setAttribute('aria-disabled', 'false');
});

show_charts();
ask();
