// Every row of E2B's wire protocol, as the unmodified JavaScript packages ask it. The server is named by E2B_API_URL, E2B_SANDBOX_URL and
// E2B_API_KEY; tests/edges/e2b/test_javascript.py starts one and runs this.
import assert from "node:assert/strict";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { Sandbox as Interpreter } from "@e2b/code-interpreter";
import { CommandExitError, FileNotFoundError, Sandbox, SandboxNotFoundError, Secret, Template, TimeoutError, Volume } from "e2b";

const MINUTE = { timeoutMs: 60_000 };
let box;

before(async () => {
  box = await Sandbox.create({ timeoutMs: 120_000, metadata: { k: "v of js" }, envs: { FOO: "bar" } });
});
after(async () => {
  for (const one of await Sandbox.list().nextItems()) await Sandbox.kill(one.sandboxId);
});

async function until(act, what) {
  for (let left = 200; left > 0; left--) {
    if (await act()) return;
    await new Promise((resolve) => setTimeout(resolve, 25));
  }
  assert.fail(`never: ${what}`);
}

test("commands: output, user, directory, variables, exit codes, time", async () => {
  assert.deepEqual((await box.commands.run("echo hi; echo $FOO")).stdout, "hi\nbar\n");
  const root = await box.commands.run("whoami; pwd; echo $A", { user: "root", cwd: "/tmp", envs: { A: "1" } });
  assert.equal(root.stdout, "root\n/tmp\n1\n");
  await assert.rejects(box.commands.run("echo oops >&2; exit 3"), (error) => {
    assert.ok(error instanceof CommandExitError);
    assert.deepEqual([error.exitCode, error.stderr], [3, "oops\n"]);
    return true;
  });
  const heard = [];
  await box.commands.run("echo a; sleep 0.1; echo b", { onStdout: (data) => heard.push(data) });
  assert.equal(heard.join(""), "a\nb\n");
  await assert.rejects(box.commands.run("sleep 60", { timeoutMs: 500 }), TimeoutError);
});

test("commands in the background: stdin, list, connect, signals", async () => {
  const cat = await box.commands.run("cat", { background: true, stdin: true });
  assert.ok((await box.commands.list()).some((process) => process.pid === cat.pid));
  await box.commands.sendStdin(cat.pid, "ping");
  const same = await box.commands.connect(cat.pid);
  await cat.sendStdin("ab");
  await box.commands.closeStdin(cat.pid);
  assert.equal((await cat.wait()).stdout, "pingab");
  await same.wait();
  const sleep = await box.commands.run("sleep 100", { background: true });
  assert.equal(await box.commands.kill(sleep.pid), true);
  await assert.rejects(sleep.wait(), (error) => error instanceof CommandExitError && error.error === "signal: killed");
  assert.equal(await box.commands.kill(999_999), false);
  await assert.rejects(box.commands.connect(999_999));
});

test("terminals", async () => {
  let seen = "";
  const terminal = await box.pty.create({ cols: 80, rows: 24, onData: (data) => (seen += new TextDecoder().decode(data)) });
  await box.pty.resize(terminal.pid, { cols: 100, rows: 30 });
  await box.pty.sendInput(terminal.pid, new TextEncoder().encode("stty size; exit 0\n"));
  assert.equal((await terminal.wait()).exitCode, 0);
  assert.match(seen, /30 100/);
});

test("files: written, read, listed, moved, removed", async () => {
  const info = await box.files.write("js/a.txt", "text");
  assert.deepEqual([info.path, info.name, info.type], ["/home/user/js/a.txt", "a.txt", "file"]);
  const kept = await box.files.write("js/b.bin", new Uint8Array([0, 255]).buffer, { gzip: true, useOctetStream: true, metadata: { author: "me" } });
  assert.deepEqual(kept.metadata, { author: "me" });
  await box.files.write("js/c.bin", new Blob(["blob"]));
  const two = await box.files.writeFiles([{ path: "js/d/1.txt", data: "1" }, { path: "/tmp/js 2.txt", data: "2" }]);
  assert.deepEqual(two.map((one) => one.path), ["/home/user/js/d/1.txt", "/tmp/js 2.txt"]);
  assert.equal(await box.files.read("js/a.txt"), "text");
  assert.deepEqual(await box.files.read("js/b.bin", { format: "bytes", gzip: true }), new Uint8Array([0, 255]));
  assert.equal(await new Response(await box.files.read("js/c.bin", { format: "stream" })).text(), "blob");
  await assert.rejects(box.files.read("nope"), FileNotFoundError);
  const entries = await box.files.list("js", { depth: 2 });
  assert.deepEqual(entries.map((entry) => [entry.path.slice(14), entry.type]).sort(), [["a.txt", "file"], ["b.bin", "file"], ["c.bin", "file"], ["d", "dir"], ["d/1.txt", "file"]]);
  const found = await box.files.getInfo("js/a.txt");
  assert.deepEqual([found.size, found.mode, found.permissions, found.owner], [4, 0o644, "-rw-r--r--", "user"]);
  assert.equal(await box.files.exists("js/a.txt"), true);
  assert.equal(await box.files.exists("js/z.txt"), false);
  assert.equal(await box.files.makeDir("js/new"), true);
  assert.equal(await box.files.makeDir("js/new"), false);
  assert.equal((await box.files.rename("js/a.txt", "js/new/a2.txt")).path, "/home/user/js/new/a2.txt");
  await box.files.remove("js/new");
  assert.equal(await box.files.exists("js/new"), false);
});

test("files are watched", async () => {
  await box.files.makeDir("watched/below");
  const events = [];
  const watch = await box.files.watchDir("watched", (event) => events.push(`${event.type} ${event.name}`), { recursive: true });
  await box.files.write("watched/below/w.txt", "x");
  await until(() => events.length >= 3, "three events");
  assert.deepEqual(events, ["create below/w.txt", "chmod below/w.txt", "write below/w.txt"]);
  await watch.stop();
});

test("signed URLs", async () => {
  await box.files.write("signed.txt", "by url");
  const down = await box.downloadUrl("signed.txt", { useSignatureExpiration: 60 });
  assert.equal(await (await fetch(down)).text(), "by url");
  assert.equal((await fetch(down.replace(/signature=v1_../, "signature=v1_xx"))).status, 401);
  const form = new FormData();
  form.append("file", new Blob(["up"]), "signed.txt");
  assert.equal((await fetch(await box.uploadUrl("signed.txt"), { method: "POST", body: form })).status, 200);
  assert.equal(await box.files.read("signed.txt"), "up");
});

test("a box is described, listed, given more time and measured", async () => {
  assert.equal(await box.isRunning(), true);
  await box.setTimeout(200_000);
  const info = await box.getInfo();
  assert.deepEqual([info.sandboxId, info.templateId, info.metadata, info.state], [box.sandboxId, "base", { k: "v of js" }, "running"]);
  assert.ok(info.endAt - Date.now() > 150_000);
  const listed = await Sandbox.list({ query: { metadata: { k: "v of js" }, state: ["running"] }, limit: 1 }).nextItems();
  assert.deepEqual(listed.map((one) => one.sandboxId), [box.sandboxId]);
  const [measured] = await box.getMetrics();
  assert.ok(measured.memTotal > 0 && measured.cpuCount >= 1);
  await box.updateNetwork({ allowOut: ["1.1.1.1"], denyOut: ["0.0.0.0/0"] });
  const same = await Sandbox.connect(box.sandboxId, MINUTE);
  assert.equal((await same.commands.run("echo same")).stdout, "same\n");
});

test("paused, resumed, killed", async () => {
  const other = await Sandbox.create(MINUTE);
  const counter = "i=0; while :; do echo $((i+=1)) > n; sleep 0.05; done";
  await other.commands.run(counter, { background: true, timeoutMs: 0 });
  await until(() => other.files.exists("n"), "a counter");
  assert.equal(await other.pause(), true);
  assert.equal((await other.getInfo()).state, "paused");
  assert.equal(await other.isRunning(), false);
  await other.connect();
  const first = Number(await other.files.read("n"));
  await until(async () => Number(await other.files.read("n")) > first, "the counter goes on");
  assert.equal(await other.kill(), true);
  assert.equal(await other.kill(), false);
  await assert.rejects(other.getInfo(), SandboxNotFoundError);
  assert.equal(await other.isRunning(), false);
});

test("snapshots and forks", async () => {
  await box.files.write("kept.txt", "kept");
  const snapshot = await box.createSnapshot({ name: "js-snap" });
  const listed = await box.listSnapshots().nextItems();
  assert.ok(listed.some((one) => one.snapshotId === snapshot.snapshotId));
  const copy = await Sandbox.create(snapshot.snapshotId, MINUTE);
  assert.equal(await copy.files.read("kept.txt"), "kept");
  await copy.kill();
  const forks = await box.fork({ count: 2, timeoutMs: 60_000 });
  assert.equal(forks.length, 2);
  for (const fork of forks) {
    assert.equal(await fork.files.read("kept.txt"), "kept");
    await fork.kill();
  }
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true);
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), false);
});

test("all options, private ports", async () => {
  const network = { allowPublicTraffic: false, allowOut: ["api.github.com"], denyOut: ["0.0.0.0/0"], rules: { "api.github.com": [{ transform: { headers: { "X-A": "b" } } }] } };
  const given = { ...MINUTE, lifecycle: { onTimeout: "pause", autoResume: true }, allowInternetAccess: false, network };
  const other = await Sandbox.create("base", given);
  await other.commands.run("python3 -m http.server 8000", { background: true, timeoutMs: 0 });
  const port = { "E2b-Sandbox-Id": other.sandboxId, "E2b-Sandbox-Port": "8000" };
  const token = { "e2b-traffic-access-token": other.trafficAccessToken };
  assert.equal((await fetch(process.env.E2B_SANDBOX_URL, { headers: port })).status, 403);
  await until(async () => (await fetch(process.env.E2B_SANDBOX_URL, { headers: { ...port, ...token } })).status === 200, "the port answers");
  assert.match(other.getHost(8000), new RegExp(`^8000-${other.sandboxId}\\.`));
  const info = await other.getInfo();
  assert.deepEqual(info.lifecycle, { onTimeout: "pause", autoResume: true });
  await other.kill();
});

test("volumes", async () => {
  const volume = await Volume.create("js-volume");
  try {
    assert.ok((await Volume.list()).some((one) => one.volumeId === volume.volumeId));
    const other = await Sandbox.create({ ...MINUTE, volumeMounts: { "/mnt/data": volume } });
    await other.files.write("/mnt/data/x.txt", "in a volume");
    await other.kill();
    const again = await Sandbox.create({ ...MINUTE, volumeMounts: { "/mnt/data": "js-volume" } });
    assert.equal(await again.files.read("/mnt/data/x.txt"), "in a volume");
    await again.kill();
  } finally {
    assert.equal(await Volume.destroy(volume.volumeId), true);
  }
});

test("the contents of volumes, without a box", async () => {
  const made = await Volume.create("js-contents");
  try {
    const volume = await Volume.connect(made.volumeId);
    assert.deepEqual([(await Volume.getInfo(made.volumeId)).name, volume.name], ["js-contents", "js-contents"]);
    const written = await volume.writeFile("/a.txt", "text", { mode: 0o600, uid: 1000, gid: 1000 });
    assert.deepEqual([written.name, written.type, written.size, written.mode & 0o777, written.uid], ["a.txt", "file", 4, 0o600, 1000]);
    const streamed = new ReadableStream({ start: (stream) => (stream.enqueue(new Uint8Array([0, 255])), stream.close()) });
    await volume.makeDir("/d/below", { force: true });
    await volume.writeFile("/d/below/b.bin", streamed);
    await volume.writeFile("/d/c.bin", new Blob(["blob"]));
    await volume.writeFile("/a.txt", "changed");
    assert.equal(await volume.readFile("/a.txt"), "changed");
    assert.deepEqual(await volume.readFile("/d/below/b.bin", { format: "bytes" }), new Uint8Array([0, 255]));
    assert.equal(await (await volume.readFile("/d/c.bin", { format: "blob" })).text(), "blob");
    assert.equal(await new Response(await volume.readFile("/d/c.bin", { format: "stream" })).text(), "blob");
    assert.deepEqual((await volume.list("/", { depth: 3 })).map((one) => one.path).sort(), ["/a.txt", "/d", "/d/below", "/d/below/b.bin", "/d/c.bin"]);
    assert.equal((await volume.updateMetadata("/a.txt", { mode: 0o644 })).mode & 0o777, 0o644);
    assert.deepEqual([await volume.exists("/a.txt"), await volume.exists("/none")], [true, false]);
    await assert.rejects(volume.readFile("/none"));
    await assert.rejects(volume.getInfo("/../../etc/passwd"));
    const other = await Sandbox.create({ ...MINUTE, volumeMounts: { "/mnt/data": volume } });
    assert.equal((await other.commands.run("cat /mnt/data/a.txt; stat -c %U /mnt/data/a.txt")).stdout, "changeduser\n");
    await other.kill();
    await volume.remove("/d");
    assert.equal(await volume.exists("/d/c.bin"), false);
  } finally {
    assert.equal(await Volume.destroy(made.volumeId), true);
  }
  await assert.rejects(Volume.connect(made.volumeId));
});

test("a gateway for MCP is a template like any", async () => {
  const prepared = await Sandbox.create(MINUTE);
  const script = (text) => prepared.files.write("/etc/profile.d/mcp-gateway.sh", `mcp-gateway() { ${text}; }\n`, { user: "root" });
  await script('echo "$1 $2 $GATEWAY_ACCESS_TOKEN" > /run/asked');
  await prepared.createSnapshot({ name: "mcp-gateway" });
  const other = await Sandbox.create({ ...MINUTE, mcp: { exa: { apiKey: "k" } } });
  const asked = (await other.commands.run("cat /run/asked", { user: "root" })).stdout;
  assert.equal(asked, `--config {"exa":{"apiKey":"k"}} ${await other.getMcpToken()}\n`);
  assert.match(other.getMcpUrl(), /50005/);
  await other.kill();
  await Sandbox.deleteSnapshot("mcp-gateway");
  await script("return 3");
  await prepared.createSnapshot({ name: "mcp-gateway" });
  await assert.rejects(Sandbox.create({ ...MINUTE, mcp: { exa: { apiKey: "k" } }, metadata: { failed: "yes" } }));
  assert.deepEqual(await Sandbox.list({ query: { metadata: { failed: "yes" } } }).nextItems(), []);
  await Sandbox.deleteSnapshot("mcp-gateway");
  await prepared.kill();
});

test("secrets", async () => {
  const made = await Secret.create("JS_SECRET", "value");
  assert.equal(await Secret.exists("JS_SECRET"), true);
  assert.ok((await Secret.list().nextItems()).some((one) => one.name === "JS_SECRET"));
  assert.ok(!JSON.stringify(made).includes("value\""));
  assert.equal(await Secret.destroy("JS_SECRET"), true);
});

test("templates are built of steps, found, tagged", async () => {
  const context = mkdtempSync(join(tmpdir(), "context-"));
  writeFileSync(join(context, "ctx.txt"), "from the context");
  const template = Template({ fileContextPath: context }).fromTemplate("base").copy("ctx.txt", "/app/").setEnvs({ BUILT: "yes" }).runCmd("echo run > /app/run.txt", { user: "root" }).setWorkdir("/app");
  const lines = [];
  const built = await Template.build(template, "js-template", { cpuCount: 1, memoryMB: 512, onBuildLogs: (entry) => lines.push(entry.message) });
  assert.ok(lines.length > 0);
  assert.equal(await Template.exists("js-template"), true);
  assert.equal(await Template.exists("js-none"), false);
  const tagged = await Template.assignTags("js-template", ["v1", "stable"]);
  assert.deepEqual([tagged.buildId, tagged.tags.toSorted()], [built.buildId, ["stable", "v1"]]);
  const tags = async () => (await Template.getTags(built.templateId)).map((one) => one.tag).sort();
  assert.deepEqual(await tags(), ["default", "stable", "v1"]);
  assert.ok((await Template.getTags("js-template")).every((one) => one.buildId === built.buildId && one.createdAt instanceof Date));
  const stable = await Sandbox.create("js-template:stable", MINUTE);
  assert.equal((await stable.commands.run("cat /app/run.txt")).stdout, "run\n");
  await stable.kill();
  await Template.removeTags("js-template", ["v1", "stable"]);
  assert.deepEqual(await tags(), ["default"]);
  await assert.rejects(Sandbox.create("js-template:v1", MINUTE));
  await assert.rejects(Template.assignTags("js-none", "v1"));
  const other = await Sandbox.create("js-template", MINUTE);
  assert.equal((await other.commands.run("pwd; cat ctx.txt /app/run.txt; echo $BUILT")).stdout, "/app\nfrom the contextrun\nyes\n");
  await other.kill();
});

test("the code interpreter", async () => {
  const other = await Interpreter.create(MINUTE);
  try {
    await other.runCode("x = 20");
    const heard = [];
    const ran = await other.runCode("print('out'); x + 22", { onStdout: (message) => heard.push(message.line) });
    assert.deepEqual([ran.text, ran.logs.stdout, heard], ["42", ["out\n"], ["out\n"]]);
    const plot = await other.runCode("import matplotlib.pyplot as plt; plt.bar(['a', 'b'], [1, 2]); plt.show()");
    assert.equal(plot.results[0].chart.type, "bar");
    assert.equal(Buffer.from(plot.results[0].png, "base64").subarray(1, 4).toString(), "PNG");
    const failed = await other.runCode("1 / 0", { envs: { A: "1" } });
    assert.equal(failed.error.name, "ZeroDivisionError");
    const context = await other.createCodeContext({ cwd: "/tmp" });
    assert.equal((await other.runCode("import os; os.getcwd()", { context })).text, "/tmp");
    assert.deepEqual((await other.listCodeContexts()).map((one) => one.language), ["python", "javascript", "python"]);
    await other.restartCodeContext(context);
    await other.removeCodeContext(context);
    assert.equal((await other.runCode("[1, 2].map((n) => n * 2)", { language: "javascript" })).text, "[ 2, 4 ]");
    await assert.rejects(other.runCode("import time; time.sleep(60)", { timeoutMs: 500 }));
    assert.equal((await other.runCode("x")).text, "20"); // interrupted, not ended
  } finally {
    await other.kill();
  }
});
