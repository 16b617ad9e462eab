// Evaluated in a run's page: every change fails, is tried again, and what the page says of it comes back.
(async () => {
  const wait = (ms) => new Promise((done) => setTimeout(done, ms)), own = window.fetch;
  const found = { step: 100, count: 1, median: 1, checkpoint: null, excluded: [], outliers: [], documents: [
    { id: "0-1", data: "support", loss: 9, step: null, seen: [[100, 9]], where: "a.jsonl, line 2", hash: "ff", elsewhere: [], text: "bad", tokens: 1 }] };
  const json = (value) => new Response(JSON.stringify(value), { headers: { "Content-Type": "application/json" } });
  let isDown = true, asked = 0;
  window.fetch = (path, given) => {
    if (path.includes("/documents")) return Promise.resolve(json(found));
    if (given && given.method === "POST" && isDown) { asked += 1; return Promise.reject(new TypeError("Failed to fetch")); }
    if (path.includes("/exclude")) return Promise.resolve(json({ said: "2 records", command: "exclude: x", excluded: [] }));
    return own(path, given);
  };
  const plot = document.querySelector(".plot"), seen = {};
  plot.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
  plot.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
  await wait(300);
  const button = (name) => [...document.querySelectorAll("button")].find((one) => one.textContent === name);
  const box = [...document.querySelectorAll("input[type=checkbox]")].find((one) => one.closest("table"));
  box.click();
  const mark = button("Mark as bad");
  mark.click();
  await wait(200);
  seen.afterFailure = [mark.disabled, document.querySelector("p.any.failed")?.textContent];
  const tags = document.querySelector("input[type=text]");
  tags.value = "mine";
  tags.dispatchEvent(new Event("change"));
  button("Archive").click();
  await wait(1500);
  seen.tags = [tags.value, tags.disabled, button("Archive").disabled, document.querySelector(".controls .failed")?.textContent];
  isDown = false;
  mark.click();
  tags.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
  await wait(1500);
  seen.afterRetry = [mark.disabled, mark.closest("section").querySelector("[role=status]").textContent, document.querySelector(".controls [role=status]").textContent, asked];
  window.fetch = own;
  return seen;
})()
