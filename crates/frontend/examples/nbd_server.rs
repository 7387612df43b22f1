//! Serves one disk over NBD until standard input ends.
//!
//! ```text
//! cargo run --release --example nbd_server -- SOCKET memory SIZE
//! cargo run --release --example nbd_server -- SOCKET file PATH
//! ```

use std::io::Read;
use std::sync::Arc;

use fathom_backend::{FileBackend, FileOptions, Memory};
use fathom_block::{Backend, Disk, DiskOptions};
use fathom_frontend::nbd::{Address, Exports, Listener, ListenerOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, kind, what] = arguments.as_slice() else {
        return Err("usage: nbd_server SOCKET memory SIZE | SOCKET file PATH".into());
    };
    let backend: Arc<dyn Backend> = match kind.as_str() {
        "memory" => Arc::new(Memory::open(what.parse()?)?),
        "file" => {
            let options = FileOptions { path: what.into(), ..FileOptions::default() };
            Arc::new(FileBackend::open(&options)?)
        }
        _ => return Err("the kind of disk is memory or file".into()),
    };
    let options = DiskOptions { name: "disk".into(), ..DiskOptions::default() };
    let exports = Arc::new(Exports::new());
    exports.add("disk", "", Disk::new(options, Vec::new(), backend)?)?;
    let address = Address::Unix(socket.into());
    let listener = Listener::new(ListenerOptions::new(address), exports)?;
    println!("listening on {}", listener.address());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    listener.shutdown();
    Ok(())
}
