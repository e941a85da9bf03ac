// The layer, from inside a box: `const layer = require("layer")`. What you may do with it is decided outside, by the
// execution you are. Nothing but node itself, from version 18 on. One request is one HTTP/1.1 exchange with LAYER_URL, over
// a connection that is kept; every verb returns a promise.
"use strict";

const net = require("node:net");
const fs = require("node:fs");
const path = require("node:path");

// Errors: the same names, codes and exit codes as outside.

class LayerError extends Error {
  constructor(message, hint = null, rows = null) {
    super(message);
    this.name = this.constructor.name;
    this.code = this.constructor.code;
    this.exitCode = this.constructor.exitCode;
    this.hint = hint;
    this.rows = rows;
  }
}

const errors = { LayerError };
LayerError.code = "error";
LayerError.status = 500;
LayerError.exitCode = 1;
for (const [name, code, status, exitCode] of [
  ["Invalid", "invalid", 400, 2],
  ["Unauthenticated", "unauthenticated", 401, 3],
  ["Denied", "denied", 403, 3],
  ["NotFound", "not_found", 404, 4],
  ["Conflict", "conflict", 409, 5],
  ["LimitExceeded", "limit_exceeded", 429, 6],
  ["Corrupt", "corrupt", 500, 7],
  ["Incompatible", "incompatible", 500, 7],
  ["Unavailable", "unavailable", 503, 8],
  ["TimedOut", "timed_out", 504, 9],
]) {
  errors[name] = { [name]: class extends LayerError {} }[name];
  Object.assign(errors[name], { code, status, exitCode });
}
const byCode = Object.fromEntries(Object.values(errors).map((kind) => [kind.code, kind]));
const byStatus = Object.fromEntries(Object.values(errors).reverse().map((kind) => [kind.status, kind]));
const { Invalid, Unavailable, TimedOut } = errors;

// JSON

/** The value as JSON; Invalid says what in it has no form there, and where. */
function encode(value, what) {
  const wrong = blame(value, what);
  if (wrong) throw new Invalid(wrong);
  return value === undefined ? "null" : JSON.stringify(value);
}

function blame(value, what) {
  const waiting = [[value, [], 0]];
  const place = (keys) => what + keys.map((key) => (typeof key === "number" ? `[${key}]` : `[${short(key)}]`)).join("");
  while (waiting.length) {
    const [part, keys, depth] = waiting.pop();
    if (depth > 500) return `${what} is nested too deep for JSON, or contains itself`;
    if (typeof part === "number" && !Number.isFinite(part)) return `${place(keys)} is ${part}, for which JSON has no form`;
    if (["bigint", "function", "symbol"].includes(typeof part)) return `${place(keys)} is a ${typeof part}, for which JSON has no form`;
    if (part === null || typeof part !== "object") continue;
    if (part instanceof Date) {
      if (Number.isNaN(part.getTime())) return `${place(keys)} is an invalid Date, for which JSON has no form`;
    } else if (Array.isArray(part)) {
      for (let at = part.length - 1; at >= 0; at--) waiting.push([part[at], [...keys, at], depth + 1]);
    } else if (part instanceof Map || part instanceof Set || part instanceof Promise || ArrayBuffer.isView(part) || part instanceof ArrayBuffer) {
      return `${place(keys)} is a ${part.constructor.name}, for which JSON has no form`;
    } else if (typeof part.toJSON !== "function") {
      for (const key of Object.keys(part).reverse()) waiting.push([part[key], [...keys, key], depth + 1]);
    }
  }
  return null;
}

function short(text) {
  return JSON.stringify(text.length <= 60 ? text : text.slice(0, 59) + "…");
}

// HTTP/1.1, as little of it as the channel speaks

const CONNECTIONS = 8; // at a time; further requests wait for one
let idle = [];
let free = CONNECTIONS;
const waiting = [];
let at = null; // where LAYER_URL leads, as it was last read

function place() {
  const url = process.env.LAYER_URL;
  if (!url) {
    throw new Unavailable("not inside a box of a layer: LAYER_URL is not set", "run this as a function or in a box of a layer");
  }
  if (at === null || at.url !== url) {
    const match = /^http:\/\/(\[[^\]]+\]|[^:/]+)(?::(\d+))?(\/.*)?$/.exec(url);
    if (!match) throw new Unavailable("LAYER_URL is not the address of a layer: http://HOST:PORT/…");
    for (const link of idle) link.destroy();
    idle = [];
    const port = match[2] || "80";
    at = { url, host: match[1].replace(/[[\]]/g, ""), port: Number(port), path: (match[3] || "").replace(/\/+$/, ""), name: `${match[1]}:${port}` };
  }
  return at;
}

function garbage(why) {
  return new Unavailable(`what answers at LAYER_URL does not speak as a layer does: ${why}`);
}

/** One request on one connection: {status, content, keep}; `lost` is set on an error when nothing had been answered. */
function talk(link, head, body) {
  return new Promise((resolve, reject) => {
    let pieces = [], size = 0, seen = null, done = false, broken = null, waited = false, heard = 0;
    const seconds = layer.timeout;
    const end = (error, value) => {
      if (done) return;
      done = true;
      link.removeAllListeners();
      link.setTimeout(0);
      if (error) {
        link.on("error", () => {});
        link.destroy();
        reject(error);
      } else resolve(value);
    };
    const look = () => {
      if (seen === null) {
        let data = pieces.length === 1 ? pieces[0] : Buffer.concat(pieces);
        for (;;) {
          const stop = data.indexOf("\r\n\r\n");
          if (stop < 0) {
            if (data.length > 65536) return end(garbage("its head has no end"));
            pieces = [data];
            size = data.length;
            return;
          }
          const lines = data.toString("latin1", 0, stop).toLowerCase();
          const start = /^http\/1\.\d (\d\d\d)/.exec(lines);
          if (!start) return end(garbage(`${short(lines.slice(0, 40))} is not how HTTP begins`));
          data = data.subarray(stop + 4);
          if (start[1][0] === "1") { // 100 Continue
            if (lines.includes("\r\nwaits:")) waited = true; // the answer comes later
            continue;
          }
          const length = /\r\ncontent-length:[ \t]*(\d+)[ \t]*(\r\n|$)/.exec(lines);
          const status = Number(start[1]);
          if ((!length && status !== 204 && status !== 304) || lines.includes("\r\ntransfer-encoding:")) {
            return end(garbage("its length is not given"));
          }
          seen = { status, length: length ? Number(length[1]) : 0, keep: !lines.includes("\r\nconnection: close") };
          pieces = [data];
          size = data.length;
          break;
        }
      }
      if (size >= seen.length) {
        const content = pieces.length === 1 ? pieces[0] : Buffer.concat(pieces);
        end(null, { status: seen.status, content: content.subarray(0, seen.length), keep: seen.keep && size === seen.length && !broken });
      }
    };
    const over = () => {
      if (seen || size) return end(garbage(seen ? `${seen.length - size} bytes are missing at its end` : "its head is cut short"));
      const error = new Unavailable(`the layer hung up without an answer: ${broken ? broken.message : "the connection is closed"}`);
      error.lost = true;
      error.waited = waited;
      end(error);
    };
    link.on("data", (piece) => {
      pieces.push(piece);
      size += piece.length;
      heard++;
      look();
    });
    link.on("error", (error) => (broken = error)); // it may have answered before it hung up; "close" comes next
    link.on("close", over);
    link.on("end", over);
    // A box that was frozen finds its time over and the answer there: that counts.
    const late = () => {
      const before = heard;
      setTimeout(() => heard === before && end(new TimedOut(`the layer did not answer within ${seconds} s`)), 50);
    };
    if (seconds) link.setTimeout(seconds * 1000, late);
    if (body.length < 65536) link.write(Buffer.concat([Buffer.from(head, "latin1"), body]));
    else {
      link.write(head, "latin1");
      link.write(body);
    }
  });
}

function connect(where) {
  return new Promise((resolve, reject) => {
    const link = net.connect({ host: where.host, port: where.port, noDelay: true });
    const fail = (error) => {
      link.removeAllListeners();
      link.on("error", () => {});
      link.destroy();
      reject(error);
    };
    link.setTimeout(Math.min(layer.timeout || 10, 10) * 1000, () => fail(new TimedOut("the layer could not be reached in time")));
    link.once("error", (error) => fail(new Unavailable(`the layer can't be reached: ${error.message}`)));
    link.once("connect", () => {
      link.removeAllListeners();
      link.setTimeout(0);
      resolve(link);
    });
  });
}

async function attempt(where, head, body, safe) {
  let link = idle.pop();
  let tries = 0;
  for (;;) {
    if (link) {
      link.removeAllListeners();
      link.ref();
    } else link = await connect(where);
    try {
      const answer = await talk(link, head, body);
      if (answer.keep && where === at) keep(link);
      else {
        link.on("error", () => {});
        link.destroy();
      }
      return answer;
    } catch (error) {
      if (!error.lost) throw error;
      link = null;
      if ((error.waited || tries) && tries < 20) {
        tries++; // whoever was to answer has ended: another goes on, and the same request gets the same answer
        await new Promise((go) => setTimeout(go, 100 * tries));
        continue;
      }
      if (!safe) throw error;
      safe = false;
    }
  }
}

function keep(link) {
  const forget = () => {
    idle = idle.filter((each) => each !== link);
    link.destroy();
  };
  for (const event of ["error", "end", "close", "data"]) link.on(event, forget);
  link.unref(); // a connection that waits keeps no program alive
  idle.push(link);
}

/** One request and its answer. What only reads is sent again, once, when a connection turns out to be closed. */
async function exchange(method, verb, body, safe = false, kind = "application/json") {
  const where = place();
  const head = `${method} ${where.path}${verb} HTTP/1.1\r\nHost: ${where.name}\r\nContent-Type: ${kind}\r\nContent-Length: ${body.length}\r\n\r\n`;
  if (free > 0) free--;
  else await new Promise((go) => waiting.push(go));
  let answer;
  try {
    answer = await attempt(where, head, body, safe);
  } finally {
    if (waiting.length) waiting.shift()();
    else free++;
  }
  let value = null;
  try {
    if (answer.content.length) value = JSON.parse(answer.content.toString("utf8"));
  } catch {
    throw garbage(`what came with status ${answer.status} is no JSON`);
  }
  if (answer.status >= 200 && answer.status < 300) {
    if (value === null || typeof value !== "object" || Array.isArray(value)) throw garbage("the answer is no JSON object");
    return value;
  }
  const said = (value && typeof value.error === "object" && value.error) || {};
  const Kind = byCode[said.code] || byStatus[answer.status] || LayerError;
  throw new Kind(String(said.message || `the layer answered ${answer.status}`), said.hint ?? null, said.rows ?? null);
}

async function ask(verb, body, safe = false) {
  return exchange("POST", verb, Buffer.from(encode(body, "the request")), safe);
}

// Verbs

const layer = {
  ...errors,

  /** Seconds to wait for an answer; null waits for ever. */
  timeout: 600,

  /** Rows of one SELECT: `query("select * from ticket where id = ?", [7])`, or `… = :id", {id: 7})`. */
  async query(sql, params = null) {
    return (await ask("/query", { sql, params }, true)).rows;
  },

  /** The first row of a SELECT, or null. */
  async one(sql, params = null) {
    return (await layer.query(sql, params))[0] ?? null;
  },

  /** Add a row and return its id; an array of rows returns an array of ids. */
  async insert(entity, values) {
    const answer = await ask("/insert", { entity, values });
    return Array.isArray(values) ? answer.ids : answer.id;
  },

  /** Set fields of a row; with {expect}, only if that is still its version, else Conflict. */
  async update(entity, id, values, { expect = null } = {}) {
    await ask("/update", { entity, id, values, expect });
  },

  /** Remove a row; with {expect}, only if that is still its version, else Conflict. */
  async remove(entity, id, { expect = null } = {}) {
    await ask("/delete", { entity, id, expect });
  },

  /** Update the row that has these values in the fields `on`, or add one; returns its id. */
  async upsert(entity, values, on) {
    return (await ask("/upsert", { entity, values, on: Array.isArray(on) ? on : [on] })).id;
  },

  /** Run another function of the layer and return its result. */
  async call(name, args = {}) {
    return (await ask("/call", { function: name, arguments: args })).result;
  },

  /** Have an agent of another contract do a task, within both contracts; how it ended, and its answer. */
  async delegate(contract, task, { slice = null } = {}) {
    return ask("/delegate", { contract, task, slice });
  },

  /** The rows of a named projection. */
  async projection(name, args = {}) {
    return (await ask("/projection", { name, arguments: args }, true)).rows;
  },

  /** The value of a secret, where it may be read at all; each reading is recorded. */
  async secret(name) {
    return (await ask("/secret", { name }, true)).value;
  },

  /** Tell of something that happened; it is kept with the execution. */
  async emit(name, data = {}) {
    await ask("/emit", { name, data });
  },

  /** Keep a file with the execution and return its digest. */
  async artifact(file, name = path.basename(file)) {
    if (!name) throw new Invalid(`an artifact needs a name, and ${short(file)} gives none`, "artifact(path, name)");
    const quoted = name.split("/").map(encodeURIComponent).join("/");
    return (await exchange("PUT", `/artifact/${quoted}`, await fs.promises.readFile(file), false, "application/octet-stream")).digest;
  },

  /** Give the final answer of an agent; once. */
  async answer(value) {
    await ask("/return", { value });
  },

  /** Who and what this execution is, and what it may do. */
  async me() {
    return exchange("GET", "/me", Buffer.alloc(0), true);
  },

  /** The path of a local read-only SQLite file with this box's slice of the layer, made fresh now. */
  async slice() {
    return (await ask("/slice", {}, true)).path;
  },
};
layer.delete = layer.remove;

module.exports = layer;
Object.defineProperty(module.exports, "_inside", { value: { encode, exchange } });
