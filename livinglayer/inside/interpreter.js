// JavaScript for layer_interpreter.py: pieces of code ({code, env}, each ended by a NUL) come at one fd, how they ended goes to another.
// They run as in Node's own shell: what is declared stays, `await` works, and the value of the last expression is the result.
"use strict";
const fs = require("fs");
const repl = require("repl");
const { PassThrough } = require("stream");
const { inspect } = require("util");

const [source, target] = process.argv.slice(2).map(Number);
process.argv.splice(1, 3);
const shell = repl.start({ prompt: "", input: new PassThrough(), output: new PassThrough().resume(), useGlobal: true, breakEvalOnSigint: true });
let interrupt = null;

function fail(error) {
  if (interrupt) interrupt(error);
  else console.error(error);
}
shell._domain?.removeAllListeners("error").on("error", fail); // where Node's shell would print it
const interrupted = () => interrupt?.(new Error("Script execution was interrupted by `SIGINT`"));
process.on("SIGINT", interrupted);
process.on("uncaughtException", (error) => console.error(error));
process.on("unhandledRejection", (error) => console.error(error));

// A shell takes no `import … from`: what it means, as one it takes.
const IMPORT = /(^|;)[ \t]*import\s+(?:([\w$]+)\s*,?\s*)?(?:\*\s*as\s+([\w$]+)\s*|\{([^}]*)\}\s*)?(?:from\s*)?(["'])([^"'\n]+)\5[ \t]*(?=;|$)/gm;
function imported(code) {
  return code.replace(IMPORT, (_, before, whole, all, some, quote, name) => {
    const parts = [...(whole ? [`default: ${whole}`] : []), ...(some ?? "").split(",").map((part) => part.trim().replace(/\s+as\s+/, ": ")).filter(Boolean)];
    const from = `await import(${quote}${name}${quote})`;
    return before + ([all && `var ${all} = ${from}`, parts.length && `var { ${parts.join(", ")} } = ${from}`].filter(Boolean).join("; ") || from);
  });
}

function run({ code, env }) {
  const before = Object.fromEntries(Object.keys(env).map((name) => [name, process.env[name]]));
  Object.assign(process.env, env);
  return new Promise((resolve, reject) => {
    interrupt = reject;
    process.off("SIGINT", interrupted); // while it runs Node's shell listens; while it waits we do
    shell.eval(imported(code) + "\n", shell.context, "cell.js", (error, value) => (error ? reject(error) : resolve(value)));
    process.on("SIGINT", interrupted);
  }).then(
    (value) => (value === undefined ? {} : { result: typeof value === "string" ? value : inspect(value) }),
    (thrown) => {
      const error = thrown?.err ?? thrown; // a piece that is not complete is wrapped
      const known = error instanceof Error || (error && typeof error.stack === "string");
      if (!known) return { error: { name: "Error", value: inspect(error), traceback: inspect(error) } };
      const own = error.stack.split("\n").filter((line) => !/^\s+at .*(node:|interpreter\.js|new Promise)/.test(line)); // not how we got there
      return { error: { name: error.name, value: error.message, traceback: own.join("\n") } };
    },
  ).then((ended) => {
    interrupt = null;
    for (const [name, value] of Object.entries(before)) {
      if (value === undefined) delete process.env[name];
      else process.env[name] = value;
    }
    return ended;
  });
}

let rest = Buffer.alloc(0);
let queue = Promise.resolve();
fs.createReadStream(null, { fd: source })
  .on("data", (data) => {
    rest = Buffer.concat([rest, data]);
    for (let end; (end = rest.indexOf(0)) >= 0; rest = rest.subarray(end + 1)) {
      const piece = JSON.parse(rest.subarray(0, end).toString());
      queue = queue.then(() => run(piece)).then((ended) => fs.writeSync(target, JSON.stringify(ended) + "\0"));
    }
  })
  .on("end", () => process.exit());
