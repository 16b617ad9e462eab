// Opens pages in a real Chromium and says what it saw, as one line of JSON. Given: the link, the folder of a profile, and
// what to do: [{page, wait, script, width, height, dark, axe, shot}], where `wait` is an expression that becomes true, `script`
// one to evaluate, `axe` asks for the faults that axe-core finds (its file is in AXE), and `shot` names a picture.
const { spawn } = require("child_process");
const fs = require("fs");
const [link, profile, orders, shots] = process.argv.slice(2);
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

(async () => {
  const flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--no-first-run", "--disable-sync", "--remote-debugging-port=0", `--user-data-dir=${profile}`, "--window-size=1200,1000", "about:blank"];
  const chrome = spawn("chromium", flags, { stdio: "ignore" });
  const seen = { errors: [], urls: [], pages: [] };
  try {
    let port = null;
    for (let i = 0; i < 120 && port === null; i++) { await sleep(250); try { port = fs.readFileSync(`${profile}/DevToolsActivePort`, "utf8").split("\n")[0]; } catch {} }
    const targets = await (await fetch(`http://127.0.0.1:${port}/json`)).json();
    const socket = new WebSocket(targets.find((one) => one.type === "page").webSocketDebuggerUrl);
    await new Promise((done) => socket.addEventListener("open", done));
    const waiting = new Map();
    let count = 0;
    socket.addEventListener("message", (message) => {
      const said = JSON.parse(message.data);
      if (said.id) waiting.get(said.id)(said.result || said);
      else if (said.method === "Runtime.exceptionThrown") seen.errors.push(said.params.exceptionDetails.exception?.description || said.params.exceptionDetails.text);
      else if (said.method === "Log.entryAdded" && said.params.entry.level === "error") seen.errors.push(`${said.params.entry.text} ${said.params.entry.url || ""}`);
      else if (said.method === "Network.requestWillBeSent") seen.urls.push(said.params.request.url);
    });
    const call = (method, params = {}) => new Promise((done) => { waiting.set(++count, done); socket.send(JSON.stringify({ id: count, method, params })); });
    const evaluate = async (expression) => (await call("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true })).result?.value;
    for (const domain of ["Runtime", "Log", "Page", "Network", "Accessibility"]) await call(`${domain}.enable`);
    let opened = false;
    for (const order of JSON.parse(orders)) {
      const width = order.width || 1200, height = order.height || 1000;
      await call("Emulation.setDeviceMetricsOverride", { width, height, deviceScaleFactor: 1, mobile: width < 600 });
      await call("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value: order.dark ? "dark" : "light" }] });
      const began = Date.now();
      if (!opened) await call("Page.navigate", { url: `${link}${order.page}` });
      else await evaluate(`location.hash = ${JSON.stringify(order.page)}`);
      opened = true;
      let isReady = false;
      for (let i = 0; i < 600 && !isReady; i++) { isReady = (await evaluate(`Boolean(${order.wait})`)) === true; if (!isReady) await sleep(50); }
      const ready = Date.now() - began;
      const found = order.script ? await evaluate(order.script) : null;
      await sleep(300);
      const tree = await call("Accessibility.getFullAXTree");
      const controls = ["button", "textbox", "combobox", "link", "checkbox", "searchbox", "spinbutton"];
      const unnamed = tree.nodes.filter((one) => !one.ignored && controls.includes(one.role?.value) && !(one.name?.value || "").trim()).map((one) => one.role.value);
      const paint = await evaluate("performance.getEntriesByName('first-contentful-paint').map((one) => one.startTime)[0]");
      const overflow = await evaluate("document.documentElement.scrollWidth - innerWidth");
      const text = await evaluate("document.body.innerText");
      const odd = text.split("\n").filter((line) => line.includes("[object") || ["null", "undefined", "NaN"].includes(line.trim()));
      let faults = null;
      if (order.axe && process.env.AXE) {
        if (!(await evaluate("typeof axe === 'object'"))) await evaluate(fs.readFileSync(process.env.AXE, "utf8") + "; true");
        const told = "((found) => found.violations.filter((one) => ['serious', 'critical'].includes(one.impact)).map((one) => `${one.id}: ${one.nodes.length}: ${one.nodes.slice(0, 3).map((node) => node.html.slice(0, 160) + ' ' + (node.any[0]?.message || node.all[0]?.message || '')).join(' | ')}`))";
        faults = await evaluate(`axe.run(document, { resultTypes: ["violations"] }).then(${told}, (problem) => ["axe: " + problem])`);
      }
      seen.pages.push({ page: order.page, isReady, ready, found, unnamed, paint, overflow, odd, faults });
      if (shots) {
        const picture = await call("Page.captureScreenshot", { captureBeyondViewport: false });
        fs.writeFileSync(`${shots}/${order.shot || seen.pages.length}.png`, Buffer.from(picture.data, "base64"));
      }
    }
    socket.close();
  } finally { chrome.kill(); }
  console.log(JSON.stringify(seen));
  process.exit(0);
})().catch((problem) => { console.error(problem); process.exit(1); });
