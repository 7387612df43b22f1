//! A guest whose memory is away, in a browser.

use super::browser::Browser;
use super::{Page, look};
use crate::pagers::{Table, at_work, configuration, connect};
use crate::process::Daemon;
use crate::vmm::{MEMORY, memfd};

#[test]
fn a_browser_shows_whose_memory_is_away() {
    let memory = memfd(MEMORY);
    let Some(table) = Table::make(&memory) else { return };
    let Some(browser) = Browser::start() else { return };
    let daemon = Daemon::start(&configuration());
    let _clients = connect(&daemon, &["root", "data"], &memory);
    table.publish(&at_work());
    let page = Page::of(&daemon);
    browser.size(1400, 1100);
    look(&page, &browser, "guests");
    let row = "document.querySelector('[aria-label=\"Pagers\"] tbody tr')?.textContent ?? ''";
    for part in ["web", "attached", "3M", "5M"] {
        browser.until(&format!("({row}).includes('{part}')"));
    }
    let guest = "document.querySelector('[aria-label=\"Guests\"] tbody tr')?.textContent ?? ''";
    browser.until(&format!("({guest}).includes('3M')"));
    browser.picture("pagers");
    assert_eq!(browser.log(), [] as [String; 0]);
}
