//! The alphabet that byte-level vocabularies write bytes in.
//!
//! Bytes that print in Latin-1 are themselves; the others follow from U+0100 on, in their order.

/// The bytes that a token stands for. A character outside the alphabet stands for its own UTF-8,
/// as in tokens that were added as text.
pub(super) fn decode(token: &str) -> impl Iterator<Item = u8> + '_ {
    token.chars().flat_map(|char| {
        let mut buffer = [0; 4];
        let bytes = match byte(char) {
            Some(byte) => {
                buffer[0] = byte;
                1
            }
            None => char.encode_utf8(&mut buffer).len(),
        };
        buffer.into_iter().take(bytes)
    })
}

/// The byte that a character stands for.
fn byte(char: char) -> Option<u8> {
    if let Ok(byte) = u8::try_from(char) {
        return prints(byte).then_some(byte);
    }
    let index = u32::from(char).checked_sub(0x100)?;
    (0..=u8::MAX)
        .filter(|&byte| !prints(byte))
        .nth(usize::try_from(index).ok()?)
}

const fn prints(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let alphabet: Vec<char> = ('\0'..='\u{200}')
            .filter(|&char| byte(char).is_some())
            .collect();
        let mut bytes: Vec<u8> = alphabet.iter().filter_map(|&char| byte(char)).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=u8::MAX).collect::<Vec<_>>());
        assert_eq!(byte('Ġ'), Some(b' '));
        assert_eq!(byte('Ċ'), Some(b'\n'));
        assert_eq!(byte(' '), None);
        assert_eq!(byte('\u{10ffff}'), None);
    }

    #[test]
    fn text_outside_the_alphabet_is_itself() {
        assert_eq!(
            decode("Ġaé€").collect::<Vec<_>>(),
            [b' ', b'a', 0xe9, 0xe2, 0x82, 0xac]
        );
    }
}
