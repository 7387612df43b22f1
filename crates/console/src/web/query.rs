//! Queries that somebody has typed. Each is a process of its own, which ends with its reader.

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::runtime::Handle;

use super::stream::Outlet;
use crate::process::spawn_bound;

/// The longest text of a query, in bytes.
pub(super) const TEXT_MAX: usize = 8 << 10;
/// The longest row that is sent, in bytes.
const ROW_MAX: u64 = 64 << 10;
/// The most that is kept of what a query says on standard error, in bytes.
const REMARKS_MAX: u64 = 16 << 10;
/// The rows, groups and values that a query may hold.
const HELD_MAX: &str = "1000000";

/// How a query has ended.
#[derive(Serialize)]
struct Ended {
    ended: bool,
    /// What it said, such as the mistake in its text.
    remarks: String,
}

/// A process that ends when nobody reads any more, also while it has no rows.
struct Running(Arc<Mutex<Child>>);

impl Running {
    fn new(child: Child, outlet: &Outlet) -> Self {
        let running = Arc::new(Mutex::new(child));
        let (watched, outlet) = (Arc::downgrade(&running), outlet.clone());
        Handle::current().spawn(async move {
            outlet.closed().await;
            if let Some(running) = watched.upgrade() {
                let _ = running.lock().kill();
            }
        });
        Self(running)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut child = self.0.lock();
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Runs a query over the live events of the daemon at `socket`, and of one disk or all. Its rows go
/// to the reader as they come. Runs on a thread of the runtime that may block.
pub(super) fn run(socket: &Path, text: &str, disk: Option<&str>, outlet: &Outlet) {
    let program = std::env::current_exe().unwrap_or_else(|_| "/proc/self/exe".into());
    let mut command = Command::new(program);
    command.args(["query", "--json", "--limit-held", HELD_MAX, "--control"]).arg(socket);
    command.args(disk.map(|disk| format!("--disk={disk}")));
    command.arg("--").arg(text);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match spawn_bound(&mut command) {
        Ok(child) => child,
        Err(error) => return end(outlet, format!("cannot start the query: {error}")),
    };
    let (rows, remarks) = (child.stdout.take(), child.stderr.take());
    let running = Running::new(child, outlet);
    let (Some(rows), Some(remarks)) = (rows, remarks) else { return };
    thread::scope(|scope| {
        let remarks = scope.spawn(move || {
            let (mut kept, mut remarks) = (Vec::new(), remarks);
            let _ = remarks.by_ref().take(REMARKS_MAX).read_to_end(&mut kept);
            let _ = std::io::copy(&mut remarks, &mut std::io::sink());
            String::from_utf8_lossy(&kept).into_owned()
        });
        let is_read = forward(BufReader::new(rows), outlet);
        if !is_read {
            let _ = running.0.lock().kill();
        }
        let remarks = remarks.join().unwrap_or_default();
        if is_read {
            end(outlet, remarks);
        }
    });
}

/// Sends each row. Returns whether there is still a reader.
fn forward(mut rows: BufReader<impl std::io::Read>, outlet: &Outlet) -> bool {
    let mut row = Vec::new();
    loop {
        row.clear();
        match rows.by_ref().take(ROW_MAX).read_until(b'\n', &mut row) {
            Ok(0) | Err(_) => return true,
            Ok(_) => {}
        }
        if !outlet.send_blocking(String::from_utf8_lossy(&row).trim_end()) {
            return false;
        }
    }
}

fn end(outlet: &Outlet, remarks: String) {
    let text = serde_json::to_string(&Ended { ended: true, remarks }).unwrap_or_default();
    outlet.send_blocking(&text);
}
