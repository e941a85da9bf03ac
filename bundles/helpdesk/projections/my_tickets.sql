select t.id, t.title, t.status, t.opened, count(m.id) as answers
from ticket t
join customer c on c.id = t.customer
left join comment m on m.ticket = t.id and m.internal = false
where c.principal = :me
group by t.id, t.title, t.status, t.opened
order by t.id
