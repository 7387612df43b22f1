//! Gives the binary its version with the last commit: `0.1.0 (52a33bc3e1f2)`. A build outside of a
//! repository has the version alone.

use std::path::Path;
use std::process::Command;

fn main() {
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let commit = git(&["rev-parse", "--short=12", "HEAD"]);
    let version = match commit {
        Some(commit) => format!("{version} ({commit})"),
        None => version,
    };
    println!("cargo:rustc-env=FATHOM_VERSION={version}");
    // The log of HEAD changes with each commit and each checkout.
    for name in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--git-path", name]);
        if let Some(path) = path.filter(|path| Path::new(path).exists()) {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    println!("cargo:rerun-if-changed=build.rs");
    // Relative relocations as a bitmap: the start reads half a mebibyte less. The C library of
    // Debian 12 and later knows them.
    println!("cargo:rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
}

/// The output of a `git` command in this repository; `None` outside of one.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
