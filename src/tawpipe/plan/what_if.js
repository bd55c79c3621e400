'use strict';
// Answers from a grid of predictions: the planner's own numbers at its points, straight lines on logarithmic scales between.
{
  const grid = JSON.parse(document.getElementById('grid').textContent);
  const knobs = grid.axes.map(axis => document.getElementById('knob-' + axis.name));
  const UNITS = {between: ' Gbit/s', inside: ' GB/s', length: ' tokens', nodes: '', devices: ''};
  const AS_FAST = 0.005;

  const positions = () => knobs.map(knob => knob ? Number(knob.value) : 0);

  // Between two neighbours, evenly on a logarithmic scale.
  function between(from, to, share) {
    return share === 0 ? from : Math.exp(Math.log(from) * (1 - share) + Math.log(to) * share);
  }

  function valueAt(axis, at) {
    const below = Math.floor(at);
    return between(axis.values[below], axis.values[Math.min(below + 1, axis.values.length - 1)], at - below);
  }

  // The corners of the cell that a place lies in, each with its weight; one alone at a point of the grid.
  function corners(place) {
    let found = [{index: 0, weight: 1}];
    place.forEach((at, number) => {
      const below = Math.floor(at), share = at - below, size = grid.axes[number].values.length;
      const ways = share === 0 ? [[below, 1]] : [[below, 1 - share], [below + 1, share]];
      found = found.flatMap(one => ways.map(([to, weight]) =>
        ({index: one.index * size + to, weight: one.weight * weight})));
    });
    return found;
  }

  function answerOf(strategy, around) {
    const cells = around.map(one => strategy.points[one.index]);
    const answer = {name: strategy.name, seconds: null, limit: '', fits: 0, exact: around.length === 1};
    if (cells.some(cell => cell === null)) return answer;
    if (answer.exact) answer.seconds = cells[0][0];
    else answer.seconds = Math.exp(cells.reduce((sum, cell, n) => sum + Math.log(cell[0]) * around[n].weight, 0));
    const nearest = around.reduce((best, one, n) => one.weight > around[best].weight ? n : best, 0);
    answer.limit = grid.limits[cells[nearest][1]];
    answer.fits = cells.reduce((sum, cell) => sum + cell[2], 0) / cells.length;
    return answer;
  }

  // Those that run first, the fastest of them first; of equal ones the plan's choice.
  function ranked(answers) {
    const order = answer => [answer.seconds === null ? 2 : answer.fits < 1 ? 1 : 0, answer.seconds ?? 0];
    answers.sort((a, b) => order(a)[0] - order(b)[0] || order(a)[1] - order(b)[1]);
    const best = answers[0], chosen = answers.findIndex(one => one.name === grid.chosen);
    if (chosen > 0 && isEqual(answers[chosen], best)) answers.unshift(...answers.splice(chosen, 1));
    return answers;
  }

  function isEqual(one, best) {
    return one.seconds !== null && best.seconds !== null && one.fits === 1 && best.fits === 1 &&
      Math.abs(one.seconds / best.seconds - 1) < AS_FAST;
  }

  const count = value => Number(value.toPrecision(4)).toLocaleString('en');
  const seconds = answer => (answer.exact ? '' : '≈ ') + (answer.seconds < 1 ? answer.seconds.toPrecision(3)
    : answer.seconds.toFixed(3));

  function cell(row, text, name = '') {
    const made = row.insertCell();
    made.textContent = text;
    if (name) made.className = name;
    return made;
  }

  function words(answer, best) {
    if (answer.seconds === null) return 'not with these settings: needs a plan of its own';
    const notes = [];
    if (answer.fits === 0) notes.push('does not fit');
    else if (answer.fits < 1) notes.push('may not fit');
    if (isEqual(answer, best) && answer !== best) notes.push('as fast');
    if (answer.name === grid.chosen) notes.push("this plan's choice");
    return [answer.limit, ...notes].join('; ');
  }

  function show() {
    const place = positions(), around = corners(place);
    const shown = grid.axes.map((axis, number) => valueAt(axis, place[number]));
    grid.axes.forEach((axis, number) => {
      const output = document.getElementById('value-' + axis.name);
      if (!output) return;
      output.textContent = count(shown[number]) + UNITS[axis.name];
      knobs[number].setAttribute('aria-valuetext', output.textContent);
    });
    const answers = ranked(grid.strategies.map(one => answerOf(one, around)));
    const best = answers[0], most = Math.max(...answers.map(one => one.seconds ?? 0));
    const body = document.getElementById('answers');
    body.replaceChildren();
    for (const answer of answers) {
      const row = body.insertRow();
      row.dataset.strategy = answer.name;
      row.dataset.exact = answer.exact;
      if (answer.seconds !== null) row.dataset.seconds = answer.seconds;
      row.className = answer === best && answer.fits === 1 ? 'chosen' : answer.fits < 1 ? 'off' : '';
      cell(row, answer.name);
      cell(row, answer.seconds === null ? '-' : seconds(answer));
      const bar = document.createElement('i');
      bar.style.width = (100 * (answer.seconds ?? 0) / most) + '%';
      cell(row, '', 'share').append(bar);
      cell(row, words(answer, best));
    }
    const said = document.getElementById('answer');
    const where = around.length === 1 ? 'predicted by the planner' : 'interpolated between predictions of the planner';
    said.dataset.exact = around.length === 1;
    if (best.seconds === null || best.fits === 0) {
      said.textContent = `No strategy fits here with the settings of this plan (${where}).`;
      return;
    }
    const at = name => shown[grid.axes.findIndex(axis => axis.name === name)];
    const tokens = grid.devices_of(at('nodes'), at('devices')) * grid.sequences * at('length') / best.seconds;
    const equal = answers.filter(one => one !== best && isEqual(one, best)).map(one => one.name);
    said.textContent = `${best.name}: ${seconds(best)} s a step, ${count(tokens)} tokens a second in all. ` +
      `Limit: ${best.limit}. ` + (equal.length ? `As fast: ${equal.join(', ')}. ` : '') +
      (best.fits < 1 ? 'It may not fit. ' : '') + `Seconds: ${where}.`;
  }

  // Nodes that are not alike stay as they are: there their number is no axis.
  grid.devices_of = (nodes, devices) => grid.uneven ? grid.devices : nodes * devices;
  for (const knob of knobs) if (knob) knob.addEventListener('input', show);
  show();
}
