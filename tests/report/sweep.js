(settings) =>
  settings.map(([strategy, budget, lambda]) => {
    const set = (id, value) => {
      const input = document.getElementById(id);
      input.value = value;
      input.dispatchEvent(new Event("input"));
    };
    document.querySelector(`input[value=${strategy}]`).click();
    set("budget", budget);
    set("lambda", lambda);
    const rows = [...document.querySelectorAll(".plan-row")];
    return {
      sizes: rows.map((row) => JSON.parse(row.dataset.sizes)),
      tiers: rows.map((row) => JSON.parse(row.dataset.tiers)),
      bytes: rows.map((row) => Number(row.dataset.bytes)),
      total: document.getElementById("plan-sum").dataset.total,
      words: document.getElementById("plan-sum").textContent,
      command: document.querySelector("#bytes .command code").textContent,
    };
  });
