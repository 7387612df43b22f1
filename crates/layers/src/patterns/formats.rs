//! The formats that files begin with: those of encrypted files, and those of other files whose
//! content looks random because it is compressed.
//!
//! A file of another format than its name promises, or of none, is what makes random content
//! suspicious. The lists need not be complete: a missing format makes a compressed file look like
//! one of random content, but never, by itself, like an encrypted one.

/// What the beginning of a file says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Start {
    /// The beginning has not been seen.
    #[default]
    Unknown,
    /// It is neither random nor of a known format, such as text.
    Plain,
    /// It has a format that is not encrypted.
    Format,
    /// It has a format of encrypted files.
    Encrypted,
    /// Its bytes look random, and have no known format.
    Random,
}

/// Formats that begin with these bytes at this place, and are not encrypted.
const FORMATS: &[(usize, &[u8])] = &[
    // Compression and archives.
    (0, b"\x1f\x8b"),
    (0, b"\x1f\x9d"),
    (0, b"\x1f\xa0"),
    (0, b"BZh"),
    (0, b"\xfd7zXZ\0"),
    (0, b"\x28\xb5\x2f\xfd"),
    (0, b"\x22\xb5\x2f\xfd"),
    (0, b"\x04\x22\x4d\x18"),
    (0, b"\x02\x21\x4c\x18"),
    (0, b"\x5d\0\0"),
    (0, b"LZIP"),
    (0, b"LRZI"),
    (0, b"\x89LZO\0"),
    (0, b"\xff\x06\0\0sNaPpY"),
    (0, b"7z\xbc\xaf\x27\x1c"),
    (0, b"Rar!\x1a\x07"),
    (0, b"PK\x03\x04"),
    (0, b"PK\x05\x06"),
    (0, b"PK\x07\x08"),
    (0, b"MSCF"),
    (0, b"!<arch>\n"),
    (0, b"xar!"),
    (0, b"070701"),
    (0, b"070702"),
    (0, b"070707"),
    (257, b"ustar"),
    (0, b"\xed\xab\xee\xdb"),
    (0, b"hsqs"),
    (0, b"PACK"),
    (0, b"DIRC"),
    // Images of disks and containers of encrypted volumes, which are written in place.
    (0, b"QFI\xfb"),
    (0, b"KDMV"),
    (0, b"conectix"),
    (0, b"vhdxfile"),
    (0, b"<<< "),
    (0, b"LUKS\xba\xbe"),
    (0, b"SKUL\xba\xbe"),
    (510, b"\x55\xaa"),
    // Pictures, sound, film.
    (0, b"\xff\xd8\xff"),
    (0, b"\x89PNG"),
    (0, b"GIF8"),
    (0, b"RIFF"),
    (0, b"RF64"),
    (0, b"II*\0"),
    (0, b"MM\0*"),
    (0, b"BM"),
    (0, b"8BPS"),
    (0, b"\0\0\x01\0"),
    (0, b"\xff\x0a"),
    (4, b"JXL "),
    (4, b"jP  "),
    (4, b"ftyp"),
    (4, b"styp"),
    (4, b"moov"),
    (4, b"moof"),
    (4, b"mdat"),
    (4, b"wide"),
    (4, b"free"),
    (4, b"skip"),
    (0, b"\x1a\x45\xdf\xa3"),
    (0, b"OggS"),
    (0, b"fLaC"),
    (0, b"ID3"),
    (0, b"FLV\x01"),
    (0, b"DKIF"),
    (0, b"\0\0\x01\xba"),
    (0, b"\0\0\x01\xb3"),
    (0, b"\0\0\x01\x67"),
    (0, b"\0\0\0\x01"),
    (0, b"\x30\x26\xb2\x75\x8e\x66\xcf\x11"),
    (0, b"MThd"),
    (0, b"FORM"),
    // Documents, programs, fonts.
    (0, b"%PDF"),
    (0, b"%!PS"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"),
    (0, b"{\\rtf"),
    (0, b"\x7fELF"),
    (0, b"MZ"),
    (0, b"\xca\xfe\xba\xbe"),
    (0, b"\xce\xfa\xed\xfe"),
    (0, b"\xcf\xfa\xed\xfe"),
    (0, b"\xfe\xed\xfa"),
    (0, b"\0asm"),
    (0, b"dex\n"),
    (0, b"wOFF"),
    (0, b"wOF2"),
    (0, b"\0\x01\0\0"),
    (0, b"OTTO"),
    // Databases, their dumps and tables.
    (0, b"SQLite format 3\0"),
    (0, b"PGDMP"),
    (0, b"PGCOPY\n"),
    (0, b"REDIS"),
    (0, b"VALKEY"),
    (0, b"\x6d\xe2\x99\x81"),
    (0, b"xbcrypt"),
    (0, b"XBSTCK01"),
    (0, b"\xfebin"),
    (0, b"PAR1"),
    (0, b"ORC"),
    (0, b"Obj\x01"),
    (0, b"ARROW1"),
    (0, b"\x89HDF"),
    (0, b"CDF"),
    (0, b"MDMP"),
    (0, b"KDUMP"),
];

/// Formats of encrypted files that begin with a text.
const ENCRYPTED: &[&[u8]] = &[
    b"Salted__",
    b"U2FsdGVkX1",
    b"age-encryption.org/",
    b"-----BEGIN AGE ENCRYPTED FILE-----",
    b"-----BEGIN PGP MESSAGE-----",
    b"$ANSIBLE_VAULT;",
    b"AES\x02",
    b"AES\x01",
    b"scrypt\0",
    b"rclone\0\0",
    b"RCLONE\0\0",
    b"gocryptfs",
    b"EncFS",
    b"untrusted comment: encrypted",
    b"WANACRY!",
    b"\x00GITCRYPT\0",
    b"enc_ccrypt",
    b"PKDPX",
];

/// The endings of names of files whose content is compressed without a mark at the beginning, or
/// which are not complete.
const UNMARKED: &[&str] = &[
    "br",
    "lzma",
    "zz",
    "zlib",
    "deflate",
    "lz4",
    "sz",
    "snappy",
    "part",
    "partial",
    "tmp",
    "temp",
    "crdownload",
    "download",
    "filepart",
    "new",
    "swp",
    "dpkg-new",
    "dpkg-tmp",
];

/// The endings of names of files that begin with one of [`FORMATS`], or are not random.
const PROMISED: &[&str] = &[
    "txt", "csv", "tsv", "log", "md", "rst", "tex", "html", "htm", "xml", "json", "jsonl", "yaml",
    "yml", "toml", "ini", "conf", "cfg", "sql", "sh", "py", "rs", "c", "h", "cpp", "hpp", "cc",
    "go", "java", "js", "php", "rb", "pl", "doc", "docx", "docm", "dot", "xls", "xlsx", "xlsm",
    "ppt", "pptx", "odt", "ods", "odp", "odg", "rtf", "pdf", "ps", "eps", "epub", "jpg", "jpeg",
    "png", "gif", "bmp", "tif", "tiff", "webp", "svg", "psd", "ico", "wav", "flac", "ogg", "mp4",
    "m4a", "m4v", "mov", "mkv", "webm", "avi", "flv", "zip", "jar", "war", "apk", "7z", "rar",
    "tar", "tgz", "gz", "bz2", "xz", "zst", "deb", "rpm", "iso", "sqlite", "sqlite3", "db3", "mdb",
    "accdb", "dbf", "pst", "ost", "eml", "mbox", "vcf", "vmdk", "vhd", "vhdx", "qcow2", "pem",
    "crt", "ipynb", "parquet", "woff", "woff2", "ttf", "otf", "elf", "so", "exe", "dll",
];

impl Start {
    /// Whether the beginning is that of an encrypted or random file; `None` if it is unknown.
    pub fn is_hidden(self) -> Option<bool> {
        match self {
            Self::Unknown => None,
            Self::Plain | Self::Format => Some(false),
            Self::Encrypted | Self::Random => Some(true),
        }
    }

    /// What the first bytes of a file say. `is_random` is whether they look random.
    pub fn of(bytes: &[u8], is_random: bool) -> Self {
        if ENCRYPTED.iter().any(|text| bytes.starts_with(text)) || is_encrypted_zip(bytes) {
            return Self::Encrypted;
        }
        let is_marked = |(at, mark): &(usize, &[u8])| {
            bytes.get(*at..).is_some_and(|rest| rest.starts_with(mark))
        };
        if FORMATS.iter().any(is_marked) || is_zlib(bytes) || is_transport(bytes) || is_sound(bytes)
        {
            return Self::Format;
        }
        match is_random {
            true if is_openpgp(bytes) => Self::Encrypted,
            true => Self::Random,
            false => Self::Plain,
        }
    }
}

/// Whether the first member of a ZIP archive is encrypted (bit 0 of its flags; APPNOTE 4.4.4).
fn is_encrypted_zip(bytes: &[u8]) -> bool {
    bytes.starts_with(b"PK\x03\x04") && bytes.get(6).is_some_and(|flags| flags & 1 == 1)
}

/// Whether the bytes begin a stream of zlib with the usual window (RFC 1950).
fn is_zlib(bytes: &[u8]) -> bool {
    let Some(&[method, flags]) = bytes.first_chunk() else { return false };
    method == 0x78 && matches!(flags, 0x01 | 0x5e | 0x9c | 0xda)
}

/// Whether packets of 188 bytes of an MPEG transport stream follow each other.
fn is_transport(bytes: &[u8]) -> bool {
    [0, 188, 376].iter().all(|at| bytes.get(*at) == Some(&0x47))
}

/// Whether frames of MPEG audio or AAC begin here: 11 or 12 bits, and a layer and rate that exist.
fn is_sound(bytes: &[u8]) -> bool {
    let Some(&[first, second, third]) = bytes.first_chunk() else { return false };
    let is_mpeg = second & 0xe0 == 0xe0 && second & 0x18 != 0x08 && second & 0x06 != 0;
    let has_rate = third & 0xf0 != 0xf0 && third & 0xf0 != 0 && third & 0x0c != 0x0c;
    first == 0xff && (is_mpeg && has_rate || matches!(second, 0xf0 | 0xf1 | 0xf8 | 0xf9))
}

/// Whether a message of `OpenPGP` begins with the packet of a session key (RFC 9580, section 5.1
/// and
/// 5.3): the tag, a length, and a version that exists.
fn is_openpgp(bytes: &[u8]) -> bool {
    let Some(&[tag, length, third, fourth]) = bytes.first_chunk() else { return false };
    match tag {
        // A key of a recipient, with a length of one or two bytes.
        0x84 | 0xc1 => length < 192 && matches!(third, 3 | 6) || tag == 0xc1 && fourth == 3,
        0x85 => length < 9 && fourth == 3,
        // A passphrase.
        0x8c | 0xc3 => length < 64 && matches!(third, 4..=6),
        _ => false,
    }
}

/// Whether the name of a file promises content that is not random, or has a known format: by its
/// ending, or by the one before an ending that was added (`report.docx.locked`).
pub(super) fn promises_format(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let mut endings = name.rsplit('.').map(str::to_ascii_lowercase);
    let (Some(last), before) = (endings.next(), endings.next()) else { return false };
    let Some(before) = before else { return false };
    if PROMISED.contains(&&*last) {
        return true;
    }
    let is_part = last.bytes().all(|byte| byte.is_ascii_digit());
    let has_third = endings.next().is_some();
    has_third && !is_part && !UNMARKED.contains(&&*last) && PROMISED.contains(&&*before)
}

/// Whether the name says that the content is compressed without a mark, or incomplete, or a part of
/// an archive.
pub(super) fn is_unmarked(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.rsplit_once('.').is_some_and(|(_, last)| {
        // Parts of an archive have numbers; versions of libraries have fewer digits.
        let is_part = last.len() >= 3 && last.bytes().all(|byte| byte.is_ascii_digit());
        is_part || UNMARKED.contains(&&*last.to_ascii_lowercase())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginnings_have_formats() {
        let of = |bytes: &[u8]| Start::of(bytes, true);
        assert_eq!(of(b"Salted__\x01\x02"), Start::Encrypted);
        assert_eq!(of(b"age-encryption.org/v1\n-> X25519"), Start::Encrypted);
        assert_eq!(of(b"\x8c\x0d\x04\x09\x03\x02"), Start::Encrypted);
        assert_eq!(of(b"\x85\x01\x0c\x03\xaa"), Start::Encrypted);
        assert_eq!(of(b"\x84\x5e\x03\xaa"), Start::Encrypted);
        assert_eq!(of(b"PK\x03\x04\x14\0\x01\0"), Start::Encrypted);
        assert_eq!(of(b"PK\x03\x04\x14\0\0\0"), Start::Format);
        assert_eq!(of(b"\xfd7zXZ\0\0"), Start::Format);
        assert_eq!(of(b"\0\0\0\x20ftypisom"), Start::Format);
        assert_eq!(of(b"\x78\x9c\x01"), Start::Format);
        assert_eq!(of(b"\xff\xfb\x90\x00"), Start::Format);
        assert_eq!(of(b"\x91\x17\x55\x00"), Start::Random);
        assert_eq!(Start::of(b"hello", false), Start::Plain);
        assert_eq!(Start::of(b"\x8c\x0d\x04\x09", false), Start::Plain);
        assert_eq!(Start::of(b"", false), Start::Plain);
        let mut tar = vec![b'a'; 512];
        tar[257..262].copy_from_slice(b"ustar");
        assert_eq!(Start::of(&tar, false), Start::Format);
    }

    #[test]
    fn names_promise_formats() {
        for path in ["/a/x.txt", "/a/x.TXT.locked", "/b/report.2024.docx.enc", "/x.tar.gz"] {
            assert!(promises_format(path), "{path}");
        }
        for path in ["/a/x", "/a/x.bin", "/a/x.zip.002", "/a/x.json.br", "/a/.txt/x", "/t.mp4.part"]
        {
            assert!(!promises_format(path), "{path}");
        }
        assert!(is_unmarked("/a/x.json.BR") && !is_unmarked("/a/x.json") && !is_unmarked("br"));
    }
}
