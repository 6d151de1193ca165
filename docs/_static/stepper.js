/* Steps through a vector token by token, and through a trace hook by hook. It computes every window and state anew, from
   the JSON alone, and says whether the expectations come out: a third definition beside the suite's two.

   No library, no request. In a page it fills every <section class="stepper">; in Node it exports `framesOf`. */
"use strict";

(function (root, make) {
  const made = make();
  if (typeof module === "object" && module.exports) module.exports = made;
  else { root.statescan = made; document.addEventListener("DOMContentLoaded", made.start); }
})(typeof self === "undefined" ? this : self, function () {
  const WORDS = { nan: NaN, inf: Infinity, "-inf": -Infinity };
  const TYPES = { f32: [24, -126, 127], f16: [11, -14, 15], bf16: [8, -126, 127] };  // p, least and largest exponent
  const MOST_WORK = 3e6, MOST_ROWS = 12, MOST_COLUMNS = 16, MOST_TABLES = 18, MOST_BYTES = 4e6;

  // ------------------------------------------------------------------------------------------------------------------
  // Tensors: { shape, data } with numbers in C order
  // ------------------------------------------------------------------------------------------------------------------

  const size = (shape) => shape.reduce((a, b) => a * b, 1);
  const number = (v) => (typeof v === "string" ? WORDS[v] : v);
  const zeros = (shape) => ({ shape, data: new Array(size(shape)).fill(0) });
  const copy = (a) => ({ shape: a.shape, data: a.data.slice() });
  const same = (a, b) => a === b || (Number.isNaN(a) && Number.isNaN(b));

  function nested(values) {
    const shape = [];
    for (let v = values; Array.isArray(v); v = v[0]) shape.push(v.length);
    return { shape, data: (Array.isArray(values) ? values.flat(Infinity) : [values]).map(number) };
  }

  function decode(spec, seed) {
    const n = size(spec.shape);
    if (spec.gen) return { shape: spec.shape, data: generate(spec.gen, spec.shape, seed || 0) };
    if (!("data" in spec)) return null;  // a blob: the numbers are not on this page
    const data = Array.isArray(spec.data) ? spec.data.map(number) : new Array(n).fill(number(spec.data));
    return { shape: spec.shape, data };
  }

  /** Entry `index` of the leading axes. */
  function part(a, ...index) {
    const shape = a.shape.slice(index.length), n = size(shape);
    const at = index.reduce((found, i, axis) => found * a.shape[axis] + i, 0);
    return { shape, data: a.data.slice(at * n, at * n + n) };
  }

  function put(a, value, ...index) {
    const n = size(a.shape.slice(index.length));
    const at = index.reduce((found, i, axis) => found * a.shape[axis] + i, 0);
    for (let i = 0; i < n; i++) a.data[at * n + i] = value.data[i];
  }

  /** The last two axes exchanged: from keys by values to values by keys, and back. */
  function turned(a) {
    const [rows, columns] = a.shape.slice(-2), lead = size(a.shape.slice(0, -2)), data = [];
    for (let m = 0; m < lead; m++)
      for (let j = 0; j < columns; j++) for (let i = 0; i < rows; i++) data.push(a.data[(m * rows + i) * columns + j]);
    return { shape: [...a.shape.slice(0, -2), columns, rows], data };
  }

  /** One rounding, to nearest, ties to even. */
  function rounded(x, type) {
    if (!(type in TYPES) || !Number.isFinite(x) || x === 0) return x;
    const [p, least, most] = TYPES[type];
    const exponent = Math.max(Math.floor(Math.log2(Math.abs(x))), least);
    const unit = 2 ** (exponent - p + 1), whole = x / unit, down = Math.floor(whole), rest = whole - down;
    const to = (rest > 0.5 || (rest === 0.5 && down % 2 !== 0) ? down + 1 : down) * unit;
    return Math.abs(to) >= 2 ** (most + 1) ? Math.sign(x) * Infinity : to;
  }

  // The generator of the formats: SplitMix64 over (seed, stream, index), turned into integers.
  const MASK = (1n << 64n) - 1n, GAMMA = 0x9e3779b97f4a7c15n;
  function mix(z) {
    z = ((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
    z = ((z ^ (z >> 27n)) * 0x94d049bb133111ebn) & MASK;
    return z ^ (z >> 31n);
  }
  function word(seed, stream, i) {
    const key = mix((BigInt(seed) + GAMMA * (BigInt(stream) + 1n)) & MASK);
    return mix((key + GAMMA * (BigInt(i) + 1n)) & MASK);
  }
  const below = (w, n) => Number(((w >> 32n) * BigInt(n)) >> 32n);
  const KINDS = {
    int: (g, w) => g.lo + below(w, g.hi - g.lo + 1),
    pick: (g, w) => g.of[below(w, g.of.length)],
    flat: (g, w) => 2 * Number(w >> BigInt(64 - g.bits)) + 1 - 2 ** g.bits,
    bell: (g, w) => {
      const m = (1n << BigInt(g.bits)) - 1n;
      return Number((w & m) + ((w >> 16n) & m) + ((w >> 32n) & m) + ((w >> 48n) & m) - 2n * m);
    },
    neg: (g, w) => -(Number(w >> BigInt(64 - g.bits)) + 1),
    const: (g) => g.value,
  };

  function generate(gen, shape, seed) {
    const data = new Array(size(shape)), last = shape[shape.length - 1];
    const axis = gen.axis === undefined ? shape.length - 1 : gen.axis, behind = size(shape.slice(axis + 1));
    if (!(gen.kind in KINDS) && gen.kind !== "onehot") return null;
    for (let i = 0; i < data.length; i++) {
      const one = gen.kind === "onehot"
        ? Number(below(word(seed, gen.stream, Math.floor(i / last)), gen.size || last) === i % last)
        : KINDS[gen.kind](gen, gen.kind === "const" ? 0n : word(seed, gen.stream, i));
      const shift = Array.isArray(gen.shift) ? gen.shift[Math.floor(i / behind) % shape[axis]] : gen.shift || 0;
      data[i] = one * 2 ** -shift;
    }
    return data;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // One token of each recurrence. `x` holds the token's inputs; window and state are changed in place.
  // ------------------------------------------------------------------------------------------------------------------

  const softplus = (x) => (x > 20 ? x : Math.log1p(Math.exp(x)));
  const silu = (x) => x / (1 + Math.exp(-x));

  function stepConvolution(window, x, inputs, args) {
    const [channels, width] = window.shape, y = zeros([channels]);
    for (let c = 0; c < channels; c++) {
      const row = c * width;
      for (let w = 0; w + 1 < width; w++) window.data[row + w] = window.data[row + w + 1];
      window.data[row + width - 1] = x.x.data[c];
      let sum = inputs.bias ? inputs.bias.data[c] : 0;
      for (let w = 0; w < width; w++) sum += inputs.weight.data[row + w] * window.data[row + w];
      y.data[c] = args.activation ? silu(sum) : sum;
    }
    return { y };
  }

  function normalised(a) {
    const [heads, dim] = a.shape.slice(-2), out = copy(a);
    for (let h = 0; h < size(a.shape) / dim; h++) {
      let sum = 1e-6;
      for (let i = 0; i < dim; i++) sum += a.data[h * dim + i] ** 2;
      for (let i = 0; i < dim; i++) out.data[h * dim + i] /= Math.sqrt(sum);
    }
    return out;
  }

  function stepDelta(state, x, inputs, args) {
    const [valueHeads, keyDim, valueDim] = state.shape, copies = x.k.shape[0];
    const q = args.use_qk_l2norm ? normalised(x.q) : x.q, k = args.use_qk_l2norm ? normalised(x.k) : x.k;
    const heads = q.shape[0], scale = args.scale == null ? keyDim ** -0.5 : args.scale;
    const o = zeros([valueHeads, valueDim]), correction = zeros([valueHeads, valueDim]);
    for (let hv = 0; hv < valueHeads; hv++) {
      const h = Math.floor(hv / (valueHeads / heads)), S = hv * keyDim * valueDim;
      for (let i = 0; i < keyDim; i++) {  // DECAY
        const g = x.g.shape.length === 2 ? x.g.data[hv * keyDim + i] : x.g.data[hv];
        for (let j = 0; j < valueDim; j++) state.data[S + i * valueDim + j] *= Math.exp(g);
      }
      for (let m = 0; m < copies; m++) {
        const K = (m * heads + h) * keyDim, V = (m * valueHeads + hv) * valueDim;
        for (let j = 0; j < valueDim; j++) {  // CORRECT and WRITE
          let held = 0;
          for (let i = 0; i < keyDim; i++) held += state.data[S + i * valueDim + j] * k.data[K + i];
          const r = x.beta.data[m * valueHeads + hv] * (x.v.data[V + j] - held);
          correction.data[hv * valueDim + j] = r;
          for (let i = 0; i < keyDim; i++) state.data[S + i * valueDim + j] += k.data[K + i] * r;
        }
      }
      for (let j = 0; j < valueDim; j++)  // READ
        for (let i = 0; i < keyDim; i++)
          o.data[hv * valueDim + j] += scale * q.data[h * keyDim + i] * state.data[S + i * valueDim + j];
    }
    return { "written, beta (v - S'k)": correction, o };
  }

  function stepSsd(state, x, inputs, args) {
    const [heads, headdim, dState] = state.shape, groups = x.B.shape[0], y = zeros([heads, headdim]);
    const limit = args.dt_limit ? args.dt_limit.map(number) : [0, Infinity], step = zeros([heads]);
    for (let h = 0; h < heads; h++) {
      const group = Math.floor(h / (heads / groups)) * dState;
      let dt = x.dt.data[h] + (inputs.dt_bias ? inputs.dt_bias.data[h] : 0);  // DISCRETISE
      if (args.dt_softplus !== false) dt = softplus(dt);
      dt = Math.min(Math.max(dt, limit[0]), limit[1]);
      step.data[h] = dt;
      for (let p = 0; p < headdim; p++) {
        const S = (h * headdim + p) * dState, write = dt * x.x.data[h * headdim + p];
        let sum = 0;
        for (let r = 0; r < dState; r++) {  // DECAY, WRITE and READ
          const decayed = state.data[S + r] * Math.exp(dt * inputs.A.data[h]);
          state.data[S + r] = decayed + write * x.B.data[group + r];
          sum += state.data[S + r] * x.C.data[group + r];
        }
        const D = inputs.D ? inputs.D.data[inputs.D.shape.length === 2 ? h * headdim + p : h] : 0;
        sum += D * x.x.data[h * headdim + p];
        y.data[h * headdim + p] = x.z ? sum * silu(x.z.data[h * headdim + p]) : sum;
      }
    }
    return { "dt after softplus and limits": step, y };
  }

  const FAMILIES = {
    causal_conv1d: { step: stepConvolution, held: "window", pool: "conv_pool", entering: "initial_windows",
      final: "final_windows", entries: "intermediate_windows", snapshots: "snapshot_windows", perToken: ["x"] },
    gated_delta_rule: { step: stepDelta, perToken: ["q", "k", "v", "g", "beta"] },
    gated_delta_product: { step: stepDelta, perToken: ["q", "k", "v", "g", "beta"] },
    kimi_delta_attention: { step: stepDelta, perToken: ["q", "k", "v", "g", "beta"] },
    ssd: { step: stepSsd, perToken: ["x", "dt", "B", "C", "z"] },
  };
  const STATES = { held: "state", pool: "state_pool", entering: "initial_state", final: "final_state",
    entries: "intermediate_states", snapshots: "snapshot_states" };

  // ------------------------------------------------------------------------------------------------------------------
  // A vector: its rows, and a frame for each token of each of them
  // ------------------------------------------------------------------------------------------------------------------

  function rowsOf(inputs, name, tokens) {
    const row = (n, batch, from, to) => ({ n, batch, from, to });
    const at = (a, n) => (a ? a.data[n] : undefined);
    const [batch, length] = tokens.shape;
    let rows;
    if (inputs.cu_seqlens) {
      const cu = inputs.cu_seqlens.data;
      rows = cu.slice(1).map((end, n) => row(n, 0, cu[n], end));
    } else if (inputs.seq_idx) {
      rows = [];
      inputs.seq_idx.data.forEach((id, t) => {
        const last = rows[rows.length - 1];
        if (id >= 0 && last && last.n === id) last.to = t + 1;
        else if (id >= 0) rows.push(row(id, 0, t, t + 1));
      });
      const entering = inputs.initial_windows || inputs.initial_state;  // a row that no token names passes through
      for (let n = 0; entering && n < entering.shape[0]; n++)
        if (!rows.some((one) => one.n === n)) rows.push(row(n, 0, 0, 0));
      rows.sort((a, b) => a.n - b.n);
    } else rows = Array.from({ length: batch }, (_, n) => row(n, n, 0, length));
    for (const one of rows) {
      if (name.endsWith("_update")) one.to = inputs.num_tokens ? at(inputs.num_tokens, one.n) : length;
      one.read = at(inputs.read_slots, one.n);
      one.write = inputs.write_slots ? at(inputs.write_slots, one.n) : one.read;
    }
    return rows;
  }

  function tokenOf(inputs, family, copies, batch, t) {
    const found = {};
    for (const name of family.perToken) {
      if (!inputs[name]) continue;
      if (family.step !== stepDelta || !["k", "v", "beta"].includes(name)) { found[name] = part(inputs[name], batch, t); continue; }
      const many = Array.from({ length: copies }, (_, m) => part(inputs[name], batch, t * copies + m));
      found[name] = { shape: [copies, ...many[0].shape], data: many.flatMap((one) => one.data) };
    }
    return found;
  }

  function vectorFrames(vector) {
    const name = Object.keys(FAMILIES).find((one) => vector.op === one || vector.op.startsWith(one + "_"));
    if (!name || !vector.inputs) return { frames: [], note: "This operation has no tokens to step through." };
    if (vector.class === "reject") return { frames: [], note: "This call is refused before the first token." };
    const family = { ...(name === "causal_conv1d" ? {} : STATES), ...FAMILIES[name] }, args = vector.args || {};
    const inputs = {}, types = {};
    for (const [key, spec] of Object.entries(vector.inputs)) {
      if (!spec || !spec.shape) continue;
      inputs[key] = decode(spec, vector.seed);
      types[key] = spec.dtype;
      if (!inputs[key] || !inputs[key].data) return { frames: [], note: `The numbers of ${key} are kept in a file of their own.` };
    }
    const result = family.step === stepDelta ? "o" : "y", first = family.step === stepDelta ? "q" : "x";
    const turn = args.state_layout === "VK" ? turned : (a) => a;
    const copies = args.num_householder == null ? 1 : args.num_householder, tokens = inputs[first];
    const rows = rowsOf(inputs, vector.op, tokens);
    const outside = family.step === stepConvolution ? inputs.weight.shape
      : family.step === stepSsd ? [...inputs.x.shape.slice(2), inputs.B.shape[3]]
      : [inputs.v.shape[2], inputs.k.shape[3], inputs.v.shape[3]];
    const work = rows.reduce((sum, one) => sum + one.to - one.from, 0) * size(outside);
    if (!(work < MOST_WORK)) return { frames: [], note: "This vector is too large to be stepped through in a page." };

    const pool = inputs[family.pool] ? turn(inputs[family.pool]) : null;
    const entries = inputs[family.entries] ? turn(inputs[family.entries]) : null;
    const snapshots = inputs[family.snapshots] ? turn(inputs[family.snapshots]) : null;
    const poolType = types[family.pool], out = zeros(resultShape(tokens, outside, family)), finals = [];
    const start = { pool: pool && copy(pool), entries: entries && copy(entries) };
    const frames = [];
    const memory = () => {
      const shown = [];
      if (pool) shown.push({ name: `${family.pool}, by slot`, ...copy(pool) });
      if (entries) shown.push({ name: `${family.entries}, by slot and entry`, ...copy(entries) });
      if (snapshots) shown.push({ name: family.snapshots, ...copy(snapshots) });
      return shown;
    };
    const stored = (a) => ({ shape: a.shape, data: a.data.map((x) => rounded(x, poolType)) });

    for (const one of rows) {
      const slotted = one.read !== undefined, fresh = slotted && one.read < 0;
      const where = slotted ? `row ${one.n}, read slot ${one.read}, write slot ${one.write}` : `segment ${one.n}`;
      if (fresh && one.write < 0 && pool) {
        frames.push({ title: `Row ${one.n} is padding`, text: "Nothing is read, nothing is written, its outputs are 0.", panels: memory() });
        continue;
      }
      let held = zeros(outside), origin = "zero";
      const accepted = inputs.num_accepted ? inputs.num_accepted.data[one.n] : -1;
      if (slotted && !fresh) {
        held = accepted >= 0 && start.entries ? part(start.entries, one.read, accepted) : part(start.pool, one.read);
        origin = accepted >= 0 ? `entry ${accepted} of slot ${one.read}` : `slot ${one.read}`;
      } else if (!slotted && inputs[family.entering]) {
        held = part(inputs[family.entering], one.n);
        origin = `${family.entering}[${one.n}]`;
      }
      held = copy(held);
      frames.push({ title: `Enter ${where}`, text: `The ${family.held} starts as ${origin}; ${one.to - one.from} tokens follow.`,
        panels: [{ name: family.held, ...copy(held) }, ...memory()] });
      for (let t = one.from; t < one.to; t++) {
        const x = tokenOf(inputs, family, copies, one.batch, t);
        const made = family.step(held, x, inputs, args);
        put(out, made[result], one.batch, t);
        if (entries && one.write >= 0) put(entries, stored(held), one.write, t - one.from);
        snapshot(t + 1);
        frames.push({ title: `Token ${t} of ${where}`, text: `Number ${t - one.from + 1} of ${one.to - one.from} in its row.`,
          panels: [...Object.entries(x).map(([key, value]) => ({ name: key, ...value, input: true })),
            { name: family.held, ...copy(held) },
            ...Object.entries(made).map(([key, value]) => ({ name: key, ...value, output: true })), ...memory()] });
      }
      finals[one.n] = held;
      if (pool && one.write >= 0) {
        put(pool, stored(held), one.write);
        frames.push({ title: `Store ${where}`, text: `The ${family.held} goes to slot ${one.write}; every other slot keeps its bits.`,
          panels: [{ name: family.held, ...copy(held) }, ...memory()] });
      }
      function snapshot(position) {
        if (!snapshots) return;
        inputs.snapshot_positions.data.forEach((p, j) => {
          if (p === position && position > one.from) put(snapshots, stored(held), j);
        });
      }
    }
    if (!frames.length) return { frames, note: "There is no row here, and so no token to step through." };
    const made = { [result]: out };
    if (pool) made[family.pool] = turn(pool);
    if (entries) made[family.entries] = turn(entries);
    if (snapshots) made[family.snapshots] = turn(snapshots);
    if (!pool && rows.length && finals.length === rows.length)
      made[family.final] = { shape: [rows.length, ...outside], data: finals.flatMap((a) => a.data) };
    return { frames: frames.map(marked), ...agreement(made, vector.expect || {}) };
  }

  function resultShape(tokens, held, family) {
    const [batch, length] = tokens.shape;
    if (family.step === stepConvolution) return [batch, length, held[0]];
    return [batch, length, held[0], family.step === stepDelta ? held[2] : held[1]];
  }

  /** Which of the expectations came out. One that is not on the page, or is not about equality, is not looked at. */
  function agreement(made, expect) {
    const checked = [], wrong = [];
    for (const [name, spec] of Object.entries(expect)) {
      if (!made[name] || !spec || spec.how !== "equal" || !("data" in spec)) continue;
      const wanted = decode(spec).data, got = made[name].data.map((x) => rounded(x, spec.dtype));
      const at = wanted.findIndex((v, i) => !same(v, got[i]));
      checked.push(name);
      if (wanted.length !== got.length || at >= 0) wrong.push(`${name}: element ${at} is ${got[at]}, expected ${wanted[at]}`);
    }
    return { checked, wrong };
  }

  // ------------------------------------------------------------------------------------------------------------------
  // A trace: what the engine edits and what the hooks leave, step by step
  // ------------------------------------------------------------------------------------------------------------------

  const POOLS = ["conv_state", "ssm_state"];

  function edited(pools, edits, kept, memory) {
    for (const edit of edits) for (const name of POOLS) {
      const pool = pools[name], key = `${edit.block}|${name}`, saved = `${edit.name}|${name}`;
      if (edit.op === "zero") put(pool, zeros(pool.shape.slice(1)), edit.slot);
      else if (edit.op === "poison") put(pool, { data: new Array(size(pool.shape.slice(1))).fill(NaN) }, edit.slot);
      else if (edit.op === "restore") { if (kept[key]) put(pool, kept[key], edit.slot); }
      else if (edit.op === "rollback" && memory[name]) put(pool, part(memory[name], edit.slot, edit.entry), edit.slot);
      else if (edit.op === "commit" && memory["snapshot|" + name]) { if (edit.kept !== false) kept[key] = part(memory["snapshot|" + name], edit.from); }
      else if (edit.op === "save") kept[saved] = part(pool, edit.slot);
      else if (edit.op === "load" && kept[saved]) put(pool, kept[saved], edit.slot);
    }
  }

  function told(edit) {
    const rest = Object.entries(edit).filter(([key]) => key !== "op").map(([key, value]) => `${key.replace("_", " ")} ${value}`);
    return `${edit.op} ${rest.join(", ")}`;
  }

  function traceFrames(trace) {
    if (trace.steps.some((step) => !step.pools_after_step)) return toyFrames(trace);
    const fill = number(trace.sizes.pool_fill === undefined ? "nan" : trace.sizes.pool_fill), pools = {}, kept = {}, frames = [];
    for (const name of POOLS) pools[name] = nested(trace.steps[0].pools_after_step[name]);
    for (const name of POOLS) pools[name].data.fill(fill);
    const shown = () => POOLS.map((name) => ({ name: `${name}, by slot`, ...copy(pools[name]) }));
    const wrong = [], checked = [];
    const compare = (stage, stored) => {
      for (const name of POOLS) {
        const wanted = nested(stored[name]), at = wanted.data.findIndex((v, i) => !same(v, pools[name].data[i]));
        checked.push(`${stage} ${name}`);
        if (at >= 0) wrong.push(`${stage}, ${name}: element ${at} is ${pools[name].data[at]}, expected ${wanted.data[at]}`);
      }
    };
    frames.push({ title: "The pools at first", text: "What a slot holds before its first request has no meaning.", panels: shown() });
    for (const step of trace.steps) {
      const program = (trace.program || []).find((one) => one.step === step.step), memory = {};
      if (step.before.length) {
        edited(pools, step.before, kept, memory);
        frames.push({ title: `Step ${step.step}, the engine before the hooks`, text: `${step.before.map(told).join("; ")}.`, panels: shown() });
      }
      const panels = [], words = [];
      for (const hook of ["decode", "prefill"]) {
        const call = step[hook];
        if (!call) continue;
        const slots = hook === "decode" ? call.batch_indices : call.context.batch_indices_prefill;
        words.push(`ssm_${hook} runs ${slots.length} requests in slots ${slots.join(", ")}`);
        panels.push({ name: `${hook}: rows in`, ...nested(call.zxBCdt), input: true });
        if (hook === "prefill") panels.push({ name: "prefill: cu_seqlens", ...nested(call.context.cu_seqlens), input: true });
        for (const [key, value] of Object.entries(call.expect)) panels.push({ name: `${hook}: ${key}`, ...nested(value), output: key === "y" });
        for (const [name, key] of [["conv_state", "intermediate_conv_state"], ["ssm_state", "intermediate_ssm_state"]])
          if (call.expect[key]) memory[name] = nested(call.expect[key]);
        for (const [name, key] of [["conv_state", "intermediate_conv_out"], ["ssm_state", "intermediate_ssm_out"]])
          if (call.expect[key]) memory["snapshot|" + name] = nested(call.expect[key]);
      }
      for (const name of POOLS) pools[name] = nested(step.pools_after_hooks[name]);
      frames.push({ title: `Step ${step.step}, the hooks`, text: `${words.join("; ")}.`, panels: [...panels, ...shown()], program });
      edited(pools, step.after, kept, memory);
      compare(`step ${step.step}`, step.pools_after_step);
      if (step.after.length)
        frames.push({ title: `Step ${step.step}, the engine after the hooks`, text: `${step.after.map(told).join("; ")}.`, panels: shown() });
    }
    return { frames: frames.map(marked), checked, wrong };
  }

  /** Traces of the mixin alone: rows in, what the toy hooks saw, rows out. */
  function toyFrames(trace) {
    const frames = trace.steps.map((step) => {
      const panels = [], expect = step.expect || {};
      for (const key of ["hidden"]) if (step[key]) panels.push({ name: "hidden states, one number a row", ...nested(step[key]), input: true });
      for (const hook of ["decode", "prefill"])
        for (const [key, value] of Object.entries(step[hook] || {})) if (Array.isArray(value)) panels.push({ name: `${hook}: ${key}`, ...nested(value), input: true });
      for (const [key, value] of Object.entries(expect)) if (Array.isArray(value) && !value.some((v) => typeof v === "string" && !(v in WORDS))) panels.push({ name: key, ...nested(value), output: true });
      const log = Array.isArray(expect.log) ? expect.log.join("; ") : expect.error ? `refused: ${JSON.stringify(expect)}` : "";
      return { title: `Step ${step.step}`, text: log, panels };
    });
    return { frames: frames.map(marked), checked: [], wrong: [] };
  }

  // ------------------------------------------------------------------------------------------------------------------
  // What changed from one frame to the next
  // ------------------------------------------------------------------------------------------------------------------

  function marked(frame, n, frames) {
    for (const panel of frame.panels) {
      if (panel.input || panel.output) continue;
      let before = null;
      for (let m = n - 1; m >= 0 && !before; m--) before = frames[m].panels.find((one) => one.name === panel.name && !one.input && !one.output);
      if (before && before.data.length === panel.data.length)
        panel.changed = panel.data.map((x, i) => !same(x, before.data[i])), panel.before = before.data;
    }
    return frame;
  }

  function changes(frame) {
    const found = [];
    for (const panel of frame.panels) (panel.changed || []).forEach((yes, i) => {
      if (yes) found.push(`${panel.name.split(",")[0]}[${place(i, panel.shape)}] ${shown(panel.before[i])} to ${shown(panel.data[i])}`);
    });
    return found;
  }

  function place(i, shape) {
    const index = [];
    for (let axis = shape.length - 1; axis >= 0; axis--) { index.unshift(i % shape[axis]); i = Math.floor(i / shape[axis]); }
    return index.join(", ");
  }

  const shown = (x) => (Number.isNaN(x) ? "nan" : Number.isInteger(x) || !Number.isFinite(x) ? String(x) : String(Number(x.toPrecision(6))));

  const framesOf = (one) => (String(one.format).startsWith("statescan.trace") ? traceFrames(one) : vectorFrames(one));

  // ------------------------------------------------------------------------------------------------------------------
  // The page. Everything from a file is put in as text.
  // ------------------------------------------------------------------------------------------------------------------

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function drawPanel(panel) {
    const kind = panel.input ? "input" : panel.output ? "output" : "memory", shape = panel.shape;
    const columns = shape.length ? shape[shape.length - 1] : 1, rows = shape.length > 1 ? shape[shape.length - 2] : 1;
    const lead = shape.slice(0, -2), many = size(lead), box = element("div", { class: `panel panel-${kind}` });
    box.append(element("h4", {}, `${panel.name} [${shape.join(", ")}]`));
    const tables = element("div", { class: "tables" });
    for (let m = 0; m < Math.min(many, MOST_TABLES); m++) {
      const table = element("table", {}), body = element("tbody", {});
      if (lead.length) table.append(element("caption", {}, `[${place(m, lead)}]`));
      for (let r = 0; r < Math.min(rows, MOST_ROWS); r++) {
        const line = element("tr", {});
        for (let c = 0; c < Math.min(columns, MOST_COLUMNS); c++) {
          const i = (m * rows + r) * columns + c, cell = element("td", {}, shown(panel.data[i]));
          if (panel.changed && panel.changed[i]) {
            cell.className = "changed";
            cell.title = `was ${shown(panel.before[i])}`;
          }
          line.append(cell);
        }
        body.append(line);
      }
      table.append(body);
      tables.append(table);
    }
    box.append(tables);
    if (many > MOST_TABLES || rows > MOST_ROWS || columns > MOST_COLUMNS) box.append(element("p", { class: "cut" }, "Only the first rows and columns are shown."));
    return box;
  }

  function build(section, one) {
    const made = framesOf(one), frames = made.frames;
    section.replaceChildren();
    section.dataset.frames = frames.length;
    section.dataset.wrong = (made.wrong || []).length;
    section.dataset.checked = (made.checked || []).length;
    if (!frames.length) { section.append(element("p", {}, made.note || "There is nothing to step through.")); return; }
    const button = (label, words) => element("button", { type: "button", "aria-label": words, title: words }, label);
    const first = button("|<", "first"), back = button("<", "back"), next = button(">", "next"), last = button(">|", "last");
    const slider = element("input", { type: "range", min: 0, max: frames.length - 1, value: 0, "aria-label": "step" });
    const where = element("output", { class: "where" }), title = element("h3", {}), words = element("p", { class: "words" });
    const live = element("p", { class: "changes", "aria-live": "polite" }), panels = element("div", { class: "panels" });
    const verdict = !made.checked.length ? "The expectations of this vector are not compared here."
      : made.wrong.length ? `Computed in this page, and not as expected: ${made.wrong.join("; ")}.`
      : `Computed in this page; equal to the expectation: ${made.checked.length > 4 ? `${made.checked.length} tensors` : made.checked.join(", ")}.`;
    section.append(element("div", { class: "controls", role: "group", "aria-label": "steps" }, first, back, next, last, slider, where),
      title, words, live, panels, element("p", { class: "verdict" }, verdict));
    let at = 0;
    const draw = () => {
      const frame = frames[at], found = changes(frame), more = found.length - 6;
      slider.value = at;
      slider.setAttribute("aria-valuetext", frame.title);
      where.textContent = `${at + 1} of ${frames.length}`;
      title.textContent = frame.title;
      words.textContent = frame.text;
      live.textContent = !at ? "" : found.length ? `Changed: ${found.slice(0, 6).join("; ")}${more > 0 ? `; and ${more} more` : ""}.` : "Nothing held in memory has changed.";
      panels.replaceChildren(...frame.panels.filter((panel) => panel.data.length).map(drawPanel));
      first.disabled = back.disabled = at === 0;
      next.disabled = last.disabled = at === frames.length - 1;
      section.dataset.at = at;
    };
    const go = (n) => { at = Math.max(0, Math.min(frames.length - 1, n)); draw(); };
    first.onclick = () => go(0);
    back.onclick = () => go(at - 1);
    next.onclick = () => go(at + 1);
    last.onclick = () => go(frames.length - 1);
    slider.oninput = () => go(Number(slider.value));
    section.onkeydown = (event) => {
      if (event.target === slider || event.altKey || event.ctrlKey || event.metaKey) return;
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: frames.length - 1 }[event.key];
      if (to !== undefined) { event.preventDefault(); go(to); }
    };
    draw();
  }

  function open(section, text) {
    try {
      if (text.length > MOST_BYTES) throw new Error("the file is too large");
      const one = JSON.parse(text);
      if (!/^statescan\.(vector|trace)\//.test(String(one && one.format))) throw new Error("it is no vector and no trace of statescan");
      build(section, one);
    } catch (error) {
      section.replaceChildren(element("p", { class: "verdict", role: "alert" }, `This file cannot be stepped through: ${error.message}`));
    }
  }

  function start() {
    for (const section of document.querySelectorAll("section.stepper[data-from]"))
      open(section, document.getElementById(section.dataset.from).textContent);
    for (const input of document.querySelectorAll("input.stepper-file"))
      input.onchange = async () => { if (input.files[0]) open(document.getElementById(input.dataset.into), await input.files[0].text()); };
  }

  return { framesOf, open, start };
});
