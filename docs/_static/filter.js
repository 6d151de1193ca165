/* A search field that hides the rows of the tables of its page that lack its words. */
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  for (const field of document.querySelectorAll("input.filter")) {
    const rows = Array.from(document.querySelectorAll(field.dataset.rows), (row) => [row, row.textContent.toLowerCase()]);
    field.oninput = () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const [row, text] of rows) row.hidden = !words.every((word) => text.includes(word));
    };
  }
});
