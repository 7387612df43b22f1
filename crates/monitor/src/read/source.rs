//! Sources of bytes: a file, or a program that decompresses one.

use std::io::{self, Read};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::thread;

use super::ReadError;

/// A source of bytes.
pub type ByteSource = Box<dyn Read + Send>;

/// The output of `bzip2 -dc`.
struct Unpacked {
    child: Child,
    output: ChildStdout,
    messages: ChildStderr,
    ended: bool,
}

/// Decompresses `packed` while it is read.
pub fn bzip2(name: &str, mut packed: ByteSource) -> Result<ByteSource, ReadError> {
    let mut command = Command::new("bzip2");
    command.arg("-dc").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| {
        let reason = match error.kind() {
            io::ErrorKind::NotFound => "there is no program bzip2".to_owned(),
            _ => format!("cannot start bzip2: {error}"),
        };
        ReadError::new(format!("cannot decompress {name}: {reason}"))
            .advise("install bzip2, or decompress the file elsewhere")
    })?;
    let (Some(mut input), Some(output), Some(messages)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err(ReadError::new(format!("cannot decompress {name}: bzip2 has no pipes")));
    };
    // The thread ends with the input, or when the output is no longer read, which breaks the pipe.
    thread::Builder::new()
        .name("unpack".into())
        .spawn(move || io::copy(&mut packed, &mut input))
        .map_err(|error| ReadError::io(name, &error))?;
    Ok(Box::new(Unpacked { child, output, messages, ended: false }))
}

impl Read for Unpacked {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.output.read(buffer)?;
        if read > 0 || buffer.is_empty() || self.ended {
            return Ok(read);
        }
        self.ended = true;
        if self.child.wait()?.success() {
            return Ok(0);
        }
        let mut message = String::new();
        let _ = (&mut self.messages).take(4096).read_to_string(&mut message);
        let message = message.lines().map(str::trim).find(|line| !line.is_empty());
        Err(io::Error::other(message.unwrap_or("bzip2 failed").to_owned()))
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
