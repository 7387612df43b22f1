//! Certificates for tests with TLS.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

/// Makes an authority, a server's certificate for this host and a client's in `folder`, under the
/// file names that NBD clients and servers expect, with `certtool` of `GnuTLS`. Returns whether
/// this host has that program.
///
/// # Panics
/// If a certificate cannot be made.
pub fn certificates(folder: &Path) -> bool {
    let Ok(_) = Command::new("certtool").arg("--version").stdout(Stdio::null()).status() else {
        eprintln!("certtool is absent: skipped");
        return false;
    };
    let run = |line: &str| {
        let mut command = Command::new("certtool");
        let done = command.args(line.split(' ')).current_dir(folder).output().expect("certtool");
        assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
    };
    for (name, template) in [
        ("ca", "cn = Test Authority\nca\ncert_signing_key\n"),
        (
            "server",
            "cn = localhost\ndns_name = localhost\nip_address = 127.0.0.1\ntls_www_server\nencryption_key\n\
             signing_key\n",
        ),
        ("client", "cn = client\ntls_www_client\nencryption_key\nsigning_key\n"),
    ] {
        fs::write(folder.join(format!("{name}.info")), template).expect("a file for certtool");
        run(&format!("--generate-privkey --rsa --bits 2048 --outfile {name}-key.pem"));
        let kind = if name == "ca" {
            "--generate-self-signed"
        } else {
            "--generate-certificate --load-ca-certificate ca-cert.pem --load-ca-privkey ca-key.pem"
        };
        run(&format!(
            "{kind} --load-privkey {name}-key.pem --template {name}.info --outfile {name}-cert.pem"
        ));
    }
    true
}
