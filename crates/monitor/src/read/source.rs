//! Where bytes come from: a file, or a program that unpacks one.

use std::io::{self, Read};
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::thread;

use super::ReadError;

/// Bytes.
pub type Source = Box<dyn Read + Send>;

/// The output of `bzip2 -dc`.
struct Unpacked {
    child: Child,
    output: ChildStdout,
    messages: ChildStderr,
    ended: bool,
}

/// Unpacks what `packed` has, as it is read.
pub fn bzip2(name: &str, mut packed: Source) -> Result<Source, ReadError> {
    let mut command = Command::new("bzip2");
    command.arg("-dc").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| {
        let told = match error.kind() {
            io::ErrorKind::NotFound => "there is no program bzip2".to_owned(),
            _ => format!("cannot start bzip2: {error}"),
        };
        ReadError::new(format!("cannot unpack {name}: {told}"))
            .advise("install bzip2, or unpack the file elsewhere")
    })?;
    let (Some(mut input), Some(output), Some(messages)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err(ReadError::new(format!("cannot unpack {name}: bzip2 has no pipes")));
    };
    // It ends with the input, or when nobody reads what is unpacked: then the pipe breaks.
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
        let mut told = String::new();
        let _ = (&mut self.messages).take(4096).read_to_string(&mut told);
        let told = told.lines().map(str::trim).find(|line| !line.is_empty());
        Err(io::Error::other(told.unwrap_or("bzip2 failed").to_owned()))
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
