// The harness of functions for node: runs one function in this process, with a clock and chance that can be had again.
//
// Reads one JSON object from stdin: {"code", "name", "arguments", "seed", "clock", "tape"}. What the function returns, or
// the error it ended with, goes to the layer as POST /return, and the process ends with 0, 1 (the function failed) or 2
// (nothing could be returned).
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");
const Module = require("node:module");
const { pathToFileURL } = require("node:url");
const layer = require(path.join(__dirname, "layer.js"));
const LAYER_FILE = path.join(__dirname, "layer.js");
const { encode, exchange } = layer._inside;

const TAPE_LENGTH = 10_000; // readings of clocks that are kept; a program that looks more often can't be replayed
const TRACE_LENGTH = 20_000;
const exit = process.exit.bind(process);
const steadyNow = process.hrtime.bigint.bind(process.hrtime);
const RealDate = Date;

// The tape

/** The clocks and the chance of one run: recorded, or with a tape given, the same again. */
class Tape {
  constructor(seed, clock, given) {
    this.crypto = require("node:crypto");
    this.hash = this.crypto.createHash.bind(this.crypto);
    this.zero = steadyNow();
    this.cpuUsage = process.cpuUsage.bind(process);
    this.clock = clock;
    const begun = clock || (given && given.start);
    this.start = begun ? RealDate.parse(begun) : RealDate.now();
    if (Number.isNaN(this.start)) throw new layer.Invalid(`the clock ${JSON.stringify(begun)} is no time in ISO 8601`);
    this.kept = { wall: [], steady: [], cpu: [] };
    this.last = { wall: 0, steady: 0, cpu: 0 };
    this.given = {};
    for (const kind of Object.keys(this.kept)) this.given[kind] = [...((given && given[kind]) || [])].reverse();
    this.room = TAPE_LENGTH;
    this.overflow = false;
    this.key = `livinglayer ${seed}`;
    this.draws = 0;
  }

  values() {
    const kept = {};
    for (const [kind, values] of Object.entries(this.kept)) if (values.length) kept[kind] = values;
    if (!this.clock) kept.start = new RealDate(this.start).toISOString();
    if (this.overflow) kept.overflow = true;
    return kept;
  }

  /** Nanoseconds since the start. */
  read(kind, elapsed) {
    const last = this.last[kind];
    const given = this.given[kind];
    const now = given.length ? last + given.pop() : Math.max(last, elapsed());
    this.last[kind] = now;
    if (this.room > 0) {
      this.room--;
      this.kept[kind].push(now - last);
    } else this.overflow = true;
    return now;
  }

  wall() {
    return this.start + Math.floor(this.read("wall", () => Number(steadyNow() - this.zero)) / 1e6);
  }

  steady() {
    return 1e9 + this.read("steady", () => Number(steadyNow() - this.zero));
  }

  cpu() {
    return this.read("cpu", () => {
      const used = this.cpuUsage();
      return (used.user + used.system) * 1000;
    });
  }

  /** The next bytes of the seed's stream; those `of` a name are always the same. */
  bytes(size, of) {
    if (size === 0) return Buffer.alloc(0);
    return this.hash("shake256", { outputLength: size }).update(`${this.key}\0${of ?? ++this.draws}`).digest();
  }

  /** A whole number below `span`, which is at most 2 ** 48. */
  below(span) {
    const most = 2 ** 48 - (2 ** 48 % span);
    for (;;) {
      const drawn = this.bytes(6).readUIntBE(0, 6);
      if (drawn < most) return drawn % span;
    }
  }

  uuid() {
    const bytes = this.bytes(16);
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    const hex = bytes.toString("hex");
    return [hex.slice(0, 8), hex.slice(8, 12), hex.slice(12, 16), hex.slice(16, 20), hex.slice(20)].join("-");
  }

  // In the place of the real ones

  install() {
    this.tameDate();
    this.tameSteady();
    this.tameChance();
    if (Module.syncBuiltinESMExports) Module.syncBuiltinESMExports();
  }

  tameDate() {
    const tape = this;
    RealDate.now = function now() {
      return tape.wall();
    };
    const Told = new Proxy(RealDate, {
      apply: () => new RealDate(tape.wall()).toString(),
      construct: (target, args, made) => Reflect.construct(target, args.length ? args : [tape.wall()], made),
    });
    RealDate.prototype.constructor = Told;
    globalThis.Date = Told;
    const form = Object.getOwnPropertyDescriptor(Intl.DateTimeFormat.prototype, "format");
    Object.defineProperty(Intl.DateTimeFormat.prototype, "format", {
      ...form,
      get() {
        const plainly = form.get.call(this);
        return (date) => plainly(date === undefined ? tape.wall() : date);
      },
    });
    const parts = Intl.DateTimeFormat.prototype.formatToParts;
    Intl.DateTimeFormat.prototype.formatToParts = function formatToParts(date) {
      return parts.call(this, date === undefined ? tape.wall() : date);
    };
  }

  tameSteady() {
    const tape = this;
    const hrtime = function hrtime(since) {
      const now = tape.steady();
      let seconds = Math.floor(now / 1e9);
      let nanos = now % 1e9;
      if (since !== undefined) {
        seconds -= since[0];
        nanos -= since[1];
        if (nanos < 0) [seconds, nanos] = [seconds - 1, nanos + 1e9];
      }
      return [seconds, nanos];
    };
    hrtime.bigint = () => BigInt(tape.steady());
    process.hrtime = hrtime;
    process.uptime = () => tape.steady() / 1e9;
    process.cpuUsage = (since) => {
      const user = Math.floor(tape.cpu() / 1000);
      return { user: user - (since ? since.user : 0), system: 0 };
    };
    const { performance } = require("node:perf_hooks");
    const own = { configurable: true, writable: true, enumerable: true };
    Object.defineProperty(performance, "now", { ...own, value: () => tape.steady() / 1e6 });
    Object.defineProperty(performance, "timeOrigin", { ...own, value: tape.start - 1000 });
  }

  tameChance() {
    const tape = this;
    const state = new Uint32Array(new Uint8Array(tape.bytes(16, "Math.random")).buffer);
    const next = () => {
      // xoshiro128**
      const rotated = Math.imul(state[1], 5);
      const result = Math.imul((rotated << 7) | (rotated >>> 25), 9) >>> 0;
      const shifted = state[1] << 9;
      state[2] ^= state[0];
      state[3] ^= state[1];
      state[1] ^= state[2];
      state[0] ^= state[3];
      state[2] ^= shifted;
      state[3] = (state[3] << 11) | (state[3] >>> 21);
      return result;
    };
    Math.random = function random() {
      return ((next() >>> 5) * 67108864 + (next() >>> 6)) / 9007199254740992;
    };
    const { crypto } = this;
    const size = (given) => {
      if (typeof given !== "number") throw new TypeError('The "size" argument must be of type number');
      if (!Number.isInteger(given) || given < 0 || given > 2 ** 31 - 1) throw new RangeError(`The value of "size" is out of range: ${given}`);
      return given;
    };
    const later = (callback, make) => {
      if (callback === undefined) return make();
      const made = make();
      process.nextTick(callback, null, made);
    };
    const fill = (into, offset = 0, count = undefined) => {
      const bytes = ArrayBuffer.isView(into) ? new Uint8Array(into.buffer, into.byteOffset, into.byteLength) : new Uint8Array(into);
      const unit = into.BYTES_PER_ELEMENT || 1;
      const from = offset * unit;
      const long = count === undefined ? bytes.length - from : count * unit;
      if (from < 0 || long < 0 || from + long > bytes.length) throw new RangeError("offset and size are outside of the buffer");
      bytes.set(tape.bytes(long), from);
      return into;
    };
    crypto.randomBytes = (count, callback) => later(callback, () => tape.bytes(size(count)));
    crypto.pseudoRandomBytes = crypto.randomBytes;
    crypto.randomFillSync = fill;
    crypto.randomFill = (into, ...more) => later(more.pop(), () => fill(into, ...more));
    crypto.randomUUID = () => tape.uuid();
    crypto.randomInt = (low, high, callback) => {
      if (high === undefined || typeof high === "function") [low, high, callback] = [0, low, high];
      if (!Number.isSafeInteger(low) || !Number.isSafeInteger(high) || high <= low || high - low > 2 ** 48) {
        throw new RangeError(`there is no whole number from ${low} to below ${high}`);
      }
      return later(callback, () => low + tape.below(high - low));
    };
    const web = (into) => {
      if (!ArrayBuffer.isView(into) || into instanceof DataView || into instanceof Float32Array || into instanceof Float64Array) {
        throw new TypeError("getRandomValues takes an array of whole numbers");
      }
      if (into.byteLength > 65536) throw new RangeError("getRandomValues gives at most 65536 bytes");
      return fill(into);
    };
    const own = { configurable: true, writable: true, enumerable: true };
    for (const each of new Set([globalThis.crypto, crypto.webcrypto])) {
      if (!each) continue;
      Object.defineProperty(each, "getRandomValues", { ...own, value: web });
      Object.defineProperty(each, "randomUUID", { ...own, value: () => tape.uuid() });
    }
    // crypto.getRandomValues itself is a getter that gives webcrypto's, and so this one.
  }
}

// One function

const ESM = /^[ \t]*(?:export\b|import\b(?![ \t]*[(.]))/m;
const WRONG = /Cannot use import statement|Unexpected token 'export'|await is only valid|Cannot use 'import\.meta'/;
const IMPORT = /(^[ \t]*(?:import|export)\b[^;'"`()]*?\bfrom[ \t]*|^[ \t]*import[ \t]*)(["'])([^"'\n]+)\2/gm;

/** The module that the code is: CommonJS, or ESM where it says import or export. */
async function load(name, code) {
  const file = path.join(process.cwd(), name);
  const module = new Module(file, null);
  module.filename = file;
  module.paths = Module._nodeModulePaths(process.cwd());
  const require_ = Module.createRequire(`${file}.js`);
  if (!ESM.test(code)) {
    const last = name.split(".").pop();
    const names = [...new Set(["main", last])].filter((each) => /^[A-Za-z_$][\w$]*$/.test(each));
    // A function that is not exported is found all the same, as in Python.
    const offered = names.map((each) => `try { if (typeof ${each} === "function") module.__named["${each}"] = ${each}; } catch {}`);
    module.__named = {};
    try {
      module._compile(`${code}\n;${offered.join(" ")}`, file);
      const own = module.exports;
      return typeof own === "function" ? { main: own } : { ...module.__named, ...(typeof own === "object" ? own : {}) };
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
      if (!WRONG.test(error.message)) {
        vm.compileFunction(code, [], { filename: file }); // the same error, without what was added
        throw error;
      }
    }
  }
  // A data: URL leaves no file behind, and imports what has a whole address: so names are made addresses here.
  const whole = code.replace(IMPORT, (all, before, quote, from) => {
    if (Module.builtinModules.includes(from.replace(/^node:/, "")) || /^(?:node|data|file|https?):/.test(from)) return all;
    try {
      return `${before}${quote}${pathToFileURL(require_.resolve(from)).href}${quote}`;
    } catch {
      return all;
    }
  });
  const source = `${whole}\n//# sourceURL=${pathToFileURL(file).href}`;
  const loaded = await import(`data:text/javascript;base64,${Buffer.from(source).toString("base64")}`);
  return typeof loaded.default === "function" && !loaded.main ? { ...loaded, main: loaded.default } : loaded;
}

/** `main`, else the function named like the last part of the name, else the only one that is exported. */
function functionOf(exported, name) {
  const last = name.split(".").pop();
  for (const wanted of ["main", last]) if (typeof exported[wanted] === "function") return exported[wanted];
  const found = Object.entries(exported).filter(([key, value]) => typeof value === "function" && !key.startsWith("_"));
  if (found.length !== 1) {
    const wanted = last === "main" ? "main" : `main or ${last}`;
    throw new layer.Invalid(`the code of '${name}' has no function ${wanted}, and not exactly one other: ${found.map(([key]) => key).join(", ") || "none"}`);
  }
  return found[0][1];
}

async function run(name, request) {
  const main = functionOf(await load(name, request.code), name);
  let value = await main(request.arguments || {});
  if (value && typeof value === "object" && typeof value.next === "function") {
    const items = [];
    if (value[Symbol.asyncIterator]) for await (const item of value) items.push(item);
    else if (value[Symbol.iterator]) for (const item of value) items.push(item);
    value = items;
  }
  return value;
}

/** What is told of an error: its type, its message, and where in the function it came from. */
function described(error, name) {
  const file = path.join(process.cwd(), name);
  const told = { type: "Error", message: "", traceback: "" };
  try {
    if (error instanceof Error) {
      told.type = String(error.name || error.constructor.name);
      told.message = String(error.message).slice(0, TRACE_LENGTH);
      const lines = String(error.stack || error).split("\n");
      const shown = lines.filter((line) => !/^\s+at /.test(line) || !(line.includes(__filename) || line.includes(LAYER_FILE) || /\bnode:|\(<anonymous>\)|new Promise/.test(line)));
      told.traceback = shown.join("\n").split(pathToFileURL(file).href).join(name).split(file).join(name).replace(/data:text\/javascript;base64,[\w+/=]*/g, name);
      if (error instanceof layer.LayerError) Object.assign(told, { code: error.code, hint: error.hint, rows: error.rows });
      if (error.cause !== undefined) told.traceback += `\ncaused by: ${error.cause && error.cause.message ? `${error.cause.name}: ${error.cause.message}` : String(error.cause)}`;
    } else {
      told.type = error === null ? "null" : typeof error;
      told.message = String(error).slice(0, TRACE_LENGTH);
    }
  } catch {
    told.message = told.message || "the message of this error can't be shown";
  }
  const half = TRACE_LENGTH / 2;
  if (told.traceback.length > TRACE_LENGTH) told.traceback = `${told.traceback.slice(0, half)}\n  …\n${told.traceback.slice(-half)}`;
  return told;
}

let tape = null;
let name = "function";
let finished = false;

async function finish(value, failed) {
  if (finished) return;
  finished = true;
  let status = failed ? 1 : 0;
  let answer;
  try {
    answer = failed ? `{"error":${encode(described(value, name), "the error")}` : `{"value":${encode(value, "the result")}`;
    if (answer === '{"value":undefined') answer = '{"value":null';
  } catch (error) {
    status = 1;
    answer = `{"error":${JSON.stringify(described(error, name))}`;
  }
  const end = `,"tape":${tape ? JSON.stringify(tape.values()) : "null"}}`;
  const send = (text) => exchange("POST", "/return", Buffer.from(text + end));
  try {
    try {
      await send(answer);
    } catch (error) {
      // A value that the layer does not take (too large, the wrong type) is an error of the function.
      if (status || error instanceof layer.Unavailable || error instanceof layer.TimedOut || error instanceof layer.Unauthenticated) throw error;
      status = 1;
      await send(`{"error":${JSON.stringify(described(error, name))}`);
    }
  } catch (error) {
    fs.writeSync(2, `layer: ${error.message}\n`);
    status = 2;
  }
  exit(status);
}

class ExitCode extends Error {
  constructor(code) {
    super(`exit code ${code}`);
    this.name = "ExitCode";
  }
}

function main() {
  let request;
  try {
    request = JSON.parse(fs.readFileSync(0, "utf8"));
    if (request === null || typeof request !== "object" || typeof request.code !== "string") throw new Error();
  } catch {
    fs.writeSync(2, 'layer: stdin is not a JSON object with the "code" of a function\n');
    exit(2);
  }
  name = String(request.name || "function");
  process.argv.splice(1, process.argv.length, name);
  process.on("uncaughtException", (error) => finish(error, true));
  process.on("unhandledRejection", (error) => finish(error, true));
  process.on("beforeExit", () => finish(new Error("the function never ends: nothing is left that its promise could wait for"), true));
  process.exit = (code) => {
    const number = code === undefined ? process.exitCode || 0 : code;
    const error = new ExitCode(number);
    finish(Number(number) ? error : null, Boolean(Number(number)));
    throw error;
  };
  Promise.resolve()
    .then(() => {
      if (request.seed !== null && request.seed !== undefined) {
        tape = new Tape(String(request.seed), request.clock, request.tape);
        tape.install();
      }
      return run(name, request);
    })
    .then(
      (value) => finish(value, false),
      (error) => finish(error, true),
    );
}

main();
