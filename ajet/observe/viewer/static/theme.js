// Runs before the page is drawn, so that a dark page never flashes light. Until the reader chooses, the system decides.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
  const apply = () => {
    root.dataset.theme = localStorage.getItem("ajet-theme") || (system.matches ? "dark" : "light");
    dispatchEvent(new Event("themechange"));
  };
  apply();
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      localStorage.setItem("ajet-theme", root.dataset.theme === "dark" ? "light" : "dark");
      apply();
    });
  });
})();
