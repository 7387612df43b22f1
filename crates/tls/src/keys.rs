//! Pre-shared keys.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use openssl::ssl::{SslMethod, SslOptions, SslVersion};

use super::{Tls, builder, named};

/// The longest shared key, in bytes: the limit of TLS 1.3 in OpenSSL.
const KEY_LENGTH_MAX: usize = 256;

impl Tls {
    /// TLS with pre-shared keys. Each line of the file is `user:key`, the key in hexadecimal, as
    /// `psktool` of `GnuTLS` writes it; empty lines and lines that begin with `#` are skipped.
    ///
    /// # Errors
    /// When the file cannot be read or a line is malformed; the text names file and line.
    pub fn shared_keys(path: &Path) -> io::Result<Self> {
        let keys = Arc::new(read_keys(path)?);
        let mut builder = builder(SslMethod::tls_server(), SslVersion::TLS1_2)?;
        builder.set_options(SslOptions::CIPHER_SERVER_PREFERENCE);
        // The hash of a shared key is SHA-256 unless both sides agree on another. TLS 1.3 would not
        // use the key with a suite of another hash.
        builder
            .set_ciphersuites("TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256")
            .map_err(io::Error::from)?;
        builder.set_cipher_list("kECDHEPSK:kDHEPSK:!eNULL").map_err(io::Error::from)?;
        builder.set_psk_server_callback(move |_, identity, target| {
            let key = identity
                .and_then(|identity| std::str::from_utf8(identity).ok())
                .and_then(|user| keys.get(user));
            match key {
                Some(key) if key.len() <= target.len() => {
                    target[..key.len()].copy_from_slice(key);
                    Ok(key.len())
                }
                _ => Ok(0),
            }
        });
        Ok(Self { context: builder.build() })
    }
}

fn read_keys(path: &Path) -> io::Result<HashMap<String, Vec<u8>>> {
    let text = fs::read_to_string(path).map_err(|error| named(path, &error))?;
    let mut keys = HashMap::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let pair = line.rsplit_once(':').and_then(|(user, key)| Some((user, from_hex(key)?)));
        let Some((user, key)) = pair else {
            let text = format!(
                "{}, line {}: a line must be user:key, with a key of at most {KEY_LENGTH_MAX} \
                 bytes in hexadecimal",
                path.display(),
                index + 1
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        };
        keys.insert(user.to_owned(), key);
    }
    if keys.is_empty() {
        let text = format!("{} contains no keys", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(keys)
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    if text.is_empty() || text.len() % 2 != 0 || text.len() > KEY_LENGTH_MAX * 2 || !text.is_ascii()
    {
        return None;
    }
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_keys_is_read_and_a_bad_line_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("keys.psk");
        fs::write(&path, "# people\nalice:00ff10\n\nbob:x:0A\n").unwrap();
        let keys = read_keys(&path).unwrap();
        assert_eq!(keys["alice"], [0, 255, 16]);
        assert_eq!(keys["bob:x"], [10]);
        assert!(Tls::shared_keys(&path).is_ok());
        for bad in ["alice", "alice:", "alice:0", "alice:zz", "alice:\u{e4}\u{e4}"] {
            fs::write(&path, format!("# people\n{bad}\n")).unwrap();
            let error = read_keys(&path).unwrap_err().to_string();
            assert!(error.contains("line 2"), "{error}");
        }
        fs::write(&path, "\n").unwrap();
        assert!(read_keys(&path).is_err());
    }
}
