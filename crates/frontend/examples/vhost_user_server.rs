//! Serves one image over vhost-user-blk, without a daemon: `vhost_user_server IMAGE SOCKET
//! [direct]`.

use std::sync::Arc;

use fathom_backend::{FileBackend, FileOptions};
use fathom_block::{Disk, DiskOptions};
use fathom_frontend::vhost_user::{Server, VhostUserOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(image), Some(socket)) = (arguments.next(), arguments.next()) else {
        return Err("usage: vhost_user_server IMAGE SOCKET [direct]".into());
    };
    let direct = arguments.next().is_some_and(|word| word == "direct");
    let options = FileOptions { path: image.into(), direct, ..FileOptions::default() };
    let backend = Arc::new(FileBackend::open(&options)?);
    let options =
        DiskOptions { name: "disk".into(), serial: "example".into(), ..DiskOptions::default() };
    let disk = Disk::new(options, Vec::new(), backend)?;
    let _server = Server::start(VhostUserOptions::new(socket), disk)?;
    loop {
        std::thread::park();
    }
}
