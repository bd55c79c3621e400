'use strict';
// Colours and sizes follow the reader's theme and window; legends and zoom are buttons, so that they work without a mouse.
const DARK = matchMedia('(prefers-color-scheme: dark)');
const NARROW = matchMedia('(max-width: 600px)');
const TOUCH = matchMedia('(pointer: coarse)');
const PLACES = ['marker.color', 'line.color', 'marker.line.color'];
const FIGURE = 'figure script[type="application/json"]';
const PARTS = 'header, section';
const given = new WeakMap();
// plotly's own `responsive` sees windows that change, and not columns that do.
const sizes = new ResizeObserver(seen => seen.forEach(({target}) => fit(target)));

function lighter(color) {
  if (typeof color !== 'string' || !/^#[0-9a-f]{6}$/i.test(color)) return color;
  const mixed = [1, 3, 5].map(at => Math.round(parseInt(color.slice(at, at + 2), 16) * 0.75 + 255 * 0.25));
  return '#' + mixed.map(part => part.toString(16).padStart(2, '0')).join('');
}

function colorsOf(plot) {
  const colors = {};
  for (const place of PLACES) {
    const own = plot.data.map(trace => place.split('.').reduce((at, key) => at && at[key], trace));
    if (own.some(color => typeof color === 'string')) colors[place] = own;
  }
  return colors;
}

// Called at the end of the page, as a figure that is drawn before its neighbours exist gets their place as well.
function draw(part) {
  for (const box of part.querySelectorAll(FIGURE)) {
    const plot = box.previousElementSibling, {data, layout} = JSON.parse(box.textContent);
    if (!window.Plotly) { plot.textContent = 'plotly.min.js is not beside this page. It draws this figure.'; continue; }
    Plotly.newPlot(plot, data, layout, {displayModeBar: false});
    given.set(plot, colorsOf(plot));
    paint(plot);
    sizes.observe(plot);
  }
}

function fit(plot) {
  if (plot.clientWidth && plot.clientWidth !== plot.querySelector('.main-svg').clientWidth) Plotly.Plots.resize(plot);
}

function paint(plot) {
  const style = getComputedStyle(document.documentElement);
  const text = style.getPropertyValue('--text').trim(), line = style.getPropertyValue('--line').trim();
  const change = {'font.color': text, 'font.size': NARROW.matches ? 10 : 12, 'hoverlabel.align': 'left',
    'hoverlabel.bgcolor': style.getPropertyValue('--soft').trim(), 'hoverlabel.font.color': text};
  if (TOUCH.matches) change.dragmode = false;  // else a finger on a figure could not scroll the page
  for (const axis of Object.keys(plot.layout)) {
    if (/^[xy]axis/.test(axis)) { change[axis + '.gridcolor'] = line; change[axis + '.zerolinecolor'] = line; }
  }
  const colors = {};
  for (const [place, own] of Object.entries(given.get(plot))) colors[place] = DARK.matches ? own.map(lighter) : own;
  Plotly.update(plot, colors, change);
}

function toggle(button) {
  const shown = button.getAttribute('aria-pressed') === 'false';
  button.setAttribute('aria-pressed', shown);
  const plot = button.closest('figure').querySelector('.js-plotly-plot');
  Plotly.restyle(plot, {visible: shown}, [Number(button.dataset.trace)]);
}

function zoom(button) {
  const plot = button.closest('figure').querySelector('.js-plotly-plot');
  const [from, to] = plot.layout.xaxis.range, middle = (from + to) / 2, half = (to - from) / 2;
  const ways = {in: [middle - half / 2, middle + half / 2], out: [middle - half * 2, middle + half * 2],
    earlier: [from - half, to - half], later: [from + half, to + half]};
  const range = ways[button.dataset.zoom];
  Plotly.relayout(plot, range ? {'xaxis.range': range} : {'xaxis.autorange': true});
}

document.addEventListener('click', ({target}) => {
  const button = target.closest('figure button');
  if (button) (button.dataset.zoom ? zoom : toggle)(button);
});
for (const media of [DARK, NARROW]) {
  media.addEventListener('change', () => document.querySelectorAll('.js-plotly-plot').forEach(paint));
}
let texts = [...document.querySelectorAll(PARTS)].map(part => part.outerHTML);  // as served, before figures are drawn
draw(document);

// A served page of a run that goes on fetches itself, and replaces what has changed: nothing scrolls or closes.
const renew = document.querySelector('meta[name=renew]');
if (renew) {
  const note = document.createElement('p');
  note.className = 'quiet';
  document.querySelector('header').after(note);
  later(note, renew.content * 1000);
}

function later(note, milliseconds) {
  note.textContent = 'This page renews itself.';
  setTimeout(() => look(note, milliseconds), milliseconds);
}

async function look(note, milliseconds) {
  const begin = performance.now();
  const answer = document.hidden ? null : await fetch(location.href).catch(() => ({ok: false}));
  const page = answer?.ok && new DOMParser().parseFromString(await answer.text(), 'text/html');
  if (page) take(page);
  if (page && !page.querySelector('meta[name=renew]')) return note.remove();
  later(note, Math.max(milliseconds, 10 * (performance.now() - begin)));  // pages of long runs take a while to make
  if (answer && !page) note.textContent = 'This page is not renewed now: `tawpipe open` has ended or cannot make it.';
}

function take(page) {
  const old = [...document.querySelectorAll(PARTS)], parts = [...page.querySelectorAll(PARTS)];
  if (old.length !== parts.length) return location.reload();  // for example, the first validation adds a chart
  const now = parts.map(part => part.outerHTML);
  parts.forEach((part, at) => now[at] === texts[at] || replace(old[at], part));
  texts = now;
}

function replace(old, part) {
  const plots = [...old.querySelectorAll('.js-plotly-plot')], boxes = [...part.querySelectorAll(FIGURE)];
  const wordsOf = at => [...at.querySelectorAll('.legend, p')].map(({textContent}) => textContent).join();
  if (!plots.length || plots.length !== boxes.length || wordsOf(old) !== wordsOf(part)) {
    old.replaceWith(part);
    return draw(part);
  }
  plots.forEach((plot, at) => {  // keeps zoom and hidden curves
    const {data} = JSON.parse(boxes[at].textContent);
    Plotly.restyle(plot, {x: data.map(trace => trace.x), y: data.map(trace => trace.y)});
    plot.parentElement.setAttribute('aria-label', boxes[at].parentElement.getAttribute('aria-label'));
  });
}
