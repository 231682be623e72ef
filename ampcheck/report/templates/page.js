"use strict";
(() => {
  const form = document.getElementById("filter");
  const items = [...document.querySelectorAll("[data-v]")];
  const groups = [...document.querySelectorAll("[data-group]")];
  const folds = [...document.querySelectorAll("details.fold")];
  const status = document.getElementById("shown");
  const wanted = () => ({
    verdicts: [...form.querySelectorAll("[name=verdict]:checked")].map((box) => box.value),
    check: form.elements.check.value,
    subject: form.elements.subject.value,
    module: form.elements.module.value.trim().toLowerCase(),
  });
  const fits = (item, filter) =>
    (!filter.verdicts.length || filter.verdicts.includes(item.dataset.v)) &&
    (!filter.check || (item.dataset.c || "").split(" ").includes(filter.check)) &&
    (!filter.subject || (item.dataset.s || "").split(" ").includes(filter.subject)) &&
    (!filter.module || (item.dataset.m || "").toLowerCase().includes(filter.module));
  const apply = () => {
    const filter = wanted();
    const active = filter.verdicts.length || filter.check || filter.subject || filter.module;
    let shown = 0;
    for (const item of items) {
      item.hidden = !fits(item, filter);
      shown += !item.hidden;
    }
    for (const group of groups) group.hidden = Boolean(active) && !group.querySelector("[data-v]:not([hidden])");
    for (const fold of folds) fold.open = Boolean(active);
    status.textContent = active ? `${shown} of ${items.length} entries` : "";
  };
  const reveal = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    if (target) target.scrollIntoView();
  };
  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(apply));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox";
    if (event.key === "/" && !typing) {
      event.preventDefault();
      form.elements.module.focus();
    } else if (event.key === "Escape" && form.contains(event.target)) {
      form.reset();
    }
  });
  window.addEventListener("hashchange", reveal);
  apply();
  reveal();
})();
